"""From events to messages: what the model sees of a conversation (OpenHands section 7).

A `ConversationMemory` is fed the log's events in order and keeps the messages made from them, so that a step costs
what is new since the last one, not the whole history.

Holds: every tool call that is shown has its result right behind it, in the order of the calls; what a request has
shown, later requests show again unchanged, so that a provider's prompt cache and a backend's memo stay warm.
Differs: a message that a reply could not know, because it came after the prompt was made, or between a call and its
result, comes after them; the original puts it before, and the model takes what it said for the answer. A finish keeps
its tool call, with a result, because the original's later prompts show a call without one. A turn that is resumed
without a word is told so, because providers refuse a prompt that ends with the model's own words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from broker.actions import AgentFinishAction, CmdRunAction, MessageAction, SystemMessageAction
from broker.agent_state import AgentState
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

MAX_MESSAGE_CHARS = 30_000
FINISH_RESULT = "The task was reported as finished."
NO_RESULT = "Done; there is nothing to show."
GO_ON = "Please go on."


@dataclass(slots=True)
class _OpenTurn:
    """A reply whose tool calls do not all have results yet, and what came meanwhile, with its event ids."""

    reply: ModelReply
    meanwhile: list[tuple[int, Message]]
    results: dict[str, str] = field(default_factory=dict)

    def is_complete(self) -> bool:
        return len(self.results) == len(self.reply.tool_calls)

    def messages(self) -> list[Message]:
        """Return the reply with those of its calls that have results, and the results; nothing if none has."""
        reply = self.reply
        calls = tuple(
            ToolCall(call.id, call.name, call.arguments) for call in reply.tool_calls if call.id in self.results
        )
        content = (TextPart(reply.content),) if reply.content.strip() else ()
        if not calls and (reply.tool_calls or not content):
            return []
        return [
            Message("assistant", content, tool_calls=calls, thinking_blocks=reply.thinking_blocks),
            *(
                Message("tool", (TextPart(self.results[call.id]),), tool_call_id=call.id, name=call.name)
                for call in calls
            ),
        ]


class ConversationMemory:
    """The messages of one conversation."""

    def __init__(self, *, max_message_chars: int = MAX_MESSAGE_CHARS) -> None:
        """Begin with an empty log.

        Args:
            max_message_chars: longest text of one observation; longer ones lose their middle.
        """
        self._max_message_chars = max_message_chars
        self._messages: list[Message] = []
        self._turn: _OpenTurn | None = None
        # What the next reply may not have seen, as it was before it was joined on: the tail of the messages.
        self._since_reply: list[tuple[int, Message]] = []
        self.version = 0

    def add(self, event: Event) -> None:
        """Take in the next event of the log."""
        assert event.id == self.version + 1, f"event {event.id} after version {self.version}"
        self.version = event.id
        if isinstance(event, ModelReply):
            self._open_turn(event)
            return
        metadata, turn = event.tool_call_metadata, self._turn
        if turn is not None and metadata is not None and metadata.reply_id == turn.reply.id:
            result = self._result_of(event)
            if result is not None:
                turn.results[metadata.tool_call_id] = result
            if turn.is_complete():
                self._close_turn()
            return
        if isinstance(event, SystemMessageAction):
            # No request has shown anything yet: an agent greets before its first step.
            self._messages.insert(0, Message("system", (TextPart(event.content),)))
            return
        message = self._message_of(event)
        if message is None:
            return
        if turn is not None:
            turn.meanwhile.append((event.id, message))
        else:
            self._keep_since_reply([(event.id, message)])

    def messages(self) -> list[Message]:
        """Return the messages so far; of a turn with open calls, only the calls that have results."""
        whole = list(self._messages)
        if self._turn is not None:
            for message in (*self._turn.messages(), *(message for _, message in self._turn.meanwhile)):
                _join(whole, message)
        return whole

    def _open_turn(self, reply: ModelReply) -> None:
        self._close_turn()
        unseen = [(event_id, message) for event_id, message in self._since_reply if event_id > reply.seen_id]
        if unseen:
            del self._messages[-len(unseen) :]
        self._since_reply = []
        self._turn = _OpenTurn(reply, unseen)
        if self._turn.is_complete():
            self._close_turn()

    def _close_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._messages += turn.messages()
            self._keep_since_reply(turn.meanwhile)

    def _keep_since_reply(self, came: list[tuple[int, Message]]) -> None:
        self._since_reply += came
        for _, message in came:
            _join(self._messages, message)

    def _message_of(self, event: Event) -> Message | None:
        """Return the message of an event that belongs to no open tool call."""
        match event:
            case MessageAction(source=EventSource.USER):
                images = tuple(ImagePart(url) for url in event.image_urls or ())
                return Message("user", (TextPart(event.content), *images))
            case CmdRunAction(source=EventSource.USER):
                return _said(f"User executed the command:\n{event.command}")
            case CmdOutputObservation(tool_call_metadata=None):
                return _said(self._cut(f"\nObserved result of command executed by user:\n{event.agent_text}"))
            case AgentStateChangedObservation(agent_state=AgentState.RUNNING) if self._is_silence():
                return _said(GO_ON)
            case Observation(tool_call_metadata=None):
                text = self._text_of(event)
                return _said(text) if text else None
        return None

    def _is_silence(self) -> bool:
        """Say whether the model spoke last, and nobody has answered."""
        return self._turn is None and bool(self._messages) and self._messages[-1].role == "assistant"

    def _result_of(self, event: Event) -> str | None:
        """Return the result of the tool call the event belongs to, or None if it brings none."""
        if isinstance(event, AgentFinishAction):
            return FINISH_RESULT
        if not isinstance(event, Observation):
            return None
        text = self._text_of(event)
        return text if text.strip() else NO_RESULT

    def _text_of(self, event: Observation) -> str:
        """Return what the model reads of an observation; empty for what it never sees."""
        render = _RENDERINGS.get(type(event))
        text = render(event) if render else event.content
        return text if isinstance(event, FileReadObservation) else self._cut(text)

    def _cut(self, text: str) -> str:
        return truncate_content(text, self._max_message_chars)


def _said(text: str) -> Message:
    return Message("user", (TextPart(text),))


def _join(messages: list[Message], message: Message) -> None:
    """Append a message; a person's second in a row begins with a blank line (OpenHands 7.3)."""
    if message.role == "user" and messages and messages[-1].role == "user":
        first, *rest = message.content
        if isinstance(first, TextPart):
            message = Message("user", (TextPart("\n\n" + first.text), *rest))
    messages.append(message)


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


def _nothing(_: Observation) -> str:
    return ""


_RENDERINGS: Mapping[type[Observation], Callable[[Any], str]] = {
    CmdOutputObservation: lambda event: event.agent_text,
    ErrorObservation: lambda event: f"{event.content}\n[Error occurred in processing last action]",
    UserRejectObservation: lambda event: f"OBSERVATION:\n{event.content}\n[Last action has been rejected by the user]",
    RecallObservation: _recall,
    AgentDelegateObservation: _delegate,
    NullObservation: _nothing,
    SuccessObservation: _nothing,
    AgentStateChangedObservation: _nothing,
    LoopDetectionObservation: lambda event: event.advice,
}
"""How a model reads what is not just its content; every other observation is."""
