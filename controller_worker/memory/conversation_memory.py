"""From events to messages: what the model sees of a conversation (OpenHands section 7).

A `ConversationMemory` is fed the log's events in order and keeps the messages made from them, so that a step costs
what is new since the last one, not the whole history.

Holds: every tool call that is shown has its result right behind it, in the order of the calls; a message is made once
and kept, so that a provider's prompt cache and a backend's memo stay warm.
Differs: a person's message that arrives between a call and its result comes after the result, because the original
puts it before the call it came after; a finish keeps its tool call, with a result, for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from broker.actions import AgentFinishAction, CmdRunAction, MessageAction, SystemMessageAction
from broker.events import Event, EventSource, ModelReply, Observation
from broker.observations import (
    AgentDelegateObservation,
    AgentStateChangedObservation,
    CmdOutputObservation,
    ErrorObservation,
    FileReadObservation,
    LoopDetectionObservation,
    NullObservation,
    RecallObservation,
    SuccessObservation,
    UserRejectObservation,
    truncate_content,
)
from controller_worker.llm.messages import ImagePart, Message, TextPart, ToolCall

FINISH_RESULT = "The task was reported as finished."


@dataclass(slots=True)
class _OpenTurn:
    """A reply whose tool calls do not all have results yet, and what came meanwhile."""

    reply: ModelReply
    results: dict[str, str] = field(default_factory=dict)
    meanwhile: list[Message] = field(default_factory=list)

    def is_complete(self) -> bool:
        return len(self.results) == len(self.reply.tool_calls)


class ConversationMemory:
    """The messages of one conversation."""

    def __init__(self, *, max_message_chars: int = 30_000) -> None:
        self._max_message_chars = max_message_chars
        self._messages: list[Message] = []
        self._turn: _OpenTurn | None = None
        self.version = 0

    def add(self, event: Event) -> None:
        """Take in the next event of the log."""
        assert event.id == self.version + 1, f"event {event.id} after version {self.version}"
        self.version = event.id
        if isinstance(event, ModelReply):
            self._close_turn()
            self._open_turn(event)
            return
        metadata = event.tool_call_metadata
        turn = self._turn
        if turn is not None and metadata is not None and metadata.reply_id == turn.reply.id:
            result = FINISH_RESULT if isinstance(event, AgentFinishAction) else self._text_of(event)
            if result is not None and not (isinstance(event, Observation) and event.kind in _SILENT):
                turn.results[metadata.tool_call_id] = result
                if turn.is_complete():
                    self._close_turn()
            return
        message = self._message_of(event)
        if message is None:
            return
        if turn is not None:
            turn.meanwhile.append(message)
        else:
            self._emit(message)

    def messages(self) -> list[Message]:
        """Return the messages so far; of a turn with open calls, only the calls that have results."""
        if self._turn is None:
            return list(self._messages)
        before, turn = len(self._messages), self._turn
        self._close_turn()
        whole = list(self._messages)
        del self._messages[before:]
        self._turn = turn
        return whole

    def _open_turn(self, reply: ModelReply) -> None:
        if reply.tool_calls:
            self._turn = _OpenTurn(reply)
        else:
            self._emit(_assistant(reply, ()))

    def _close_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        calls = tuple(
            ToolCall(call.id, call.name, call.arguments) for call in turn.reply.tool_calls if call.id in turn.results
        )
        if calls:
            self._emit(_assistant(turn.reply, calls))
        for call in calls:
            text = TextPart(turn.results[call.id])
            self._emit(Message("tool", (text,), tool_call_id=call.id, name=call.name))
        for message in turn.meanwhile:
            self._emit(message)

    def _emit(self, message: Message) -> None:
        if message.role == "user" and self._messages and self._messages[-1].role == "user" and message.content:
            first, *rest = message.content
            if isinstance(first, TextPart):
                message = Message("user", (TextPart("\n\n" + first.text), *rest))
        self._messages.append(message)

    def _message_of(self, event: Event) -> Message | None:
        """Return the message of an event that belongs to no open tool call."""
        match event:
            case SystemMessageAction():
                return Message("system", (TextPart(event.content),))
            case MessageAction(source=EventSource.USER):
                images = tuple(ImagePart(url) for url in event.image_urls or ())
                return Message("user", (TextPart(event.content), *images))
            case CmdRunAction(source=EventSource.USER):
                return Message("user", (TextPart(f"User executed the command:\n{event.command}"),))
            case CmdOutputObservation(tool_call_metadata=None):
                heading = "\nObserved result of command executed by user:\n"
                return Message("user", (TextPart(self._cut(heading + event.agent_text)),))
            case Observation(tool_call_metadata=None):
                text = self._text_of(event)
                return Message("user", (TextPart(text),)) if text else None
        return None

    def _text_of(self, event: Event) -> str | None:
        """Return what the model reads of an observation; None for what it never sees."""
        if not isinstance(event, Observation):
            return None
        render = _RENDERINGS.get(type(event))
        text = render(event) if render else event.content
        return text if isinstance(event, FileReadObservation) else self._cut(text)

    def _cut(self, text: str) -> str:
        return truncate_content(text, self._max_message_chars)


def _assistant(reply: ModelReply, calls: tuple[ToolCall, ...]) -> Message:
    content = (TextPart(reply.content),) if reply.content.strip() else ()
    return Message("assistant", content, tool_calls=calls, thinking_blocks=reply.thinking_blocks)


def _recall(event: RecallObservation) -> str:
    lines = []
    if event.working_dir:
        lines.append(f"The workspace is {event.working_dir}.")
    if event.date:
        lines.append(f"Today is {event.date} (UTC).")
    if event.repo_instructions:
        lines.append(event.repo_instructions)
    lines += [f"<{item.name}>\n{item.content}\n</{item.name}>" for item in event.microagent_knowledge]
    return "\n".join(lines)


def _delegate(event: AgentDelegateObservation) -> str:
    return str(event.outputs.get("content") or event.content)


_SILENT = frozenset(
    {
        NullObservation.model_fields["kind"].default,
        SuccessObservation.model_fields["kind"].default,
        AgentStateChangedObservation.model_fields["kind"].default,
        LoopDetectionObservation.model_fields["kind"].default,
    }
)
"""Observations that no model sees."""

_RENDERINGS: Mapping[type[Observation], Callable[[Any], str]] = {
    CmdOutputObservation: lambda event: event.agent_text,
    ErrorObservation: lambda event: f"{event.content}\n[Error occurred in processing last action]",
    UserRejectObservation: lambda event: (
        f"OBSERVATION:\n{event.content}\n[Last action has been rejected by the user]"
    ),
    RecallObservation: _recall,
    AgentDelegateObservation: _delegate,
    NullObservation: lambda _: "",
    SuccessObservation: lambda _: "",
    AgentStateChangedObservation: lambda _: "",
    LoopDetectionObservation: lambda _: "",
}
