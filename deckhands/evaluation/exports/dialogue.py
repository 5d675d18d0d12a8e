"""A log as a dialogue: the messages to the model, its replies, its tool calls, and their results.

Holds: turns are in the order of the log, except for the system prompt, which is the first. A call keeps the id that the
model gave it, and its result names that id.
Does not: omit history that a condensation forgot, because the dialogue is the whole history and not one prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from broker.contract import (
    ConversationCreated,
    Event,
    EventSource,
    MessageAction,
    ModelReply,
    Observation,
    SystemMessageAction,
    find_rolled_back,
)

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class DialogueCall:
    """A call of a tool."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DialogueTurn:
    """One message.

    Attributes:
        calls: the tool calls of the assistant.
        call_id: for a tool result: the call that it answers; `name` is the tool.
        thinking: the model's reasoning, if its provider returns it.
        reply: for the assistant: the whole reply of the model.
    """

    role: Role
    content: str
    at: datetime | None = None
    calls: tuple[DialogueCall, ...] = ()
    call_id: str = ""
    name: str = ""
    thinking: str = ""
    images: tuple[str, ...] = ()
    reply: ModelReply | None = None


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The content of a log for training or comparing agents.

    Attributes:
        tools: the names of the agent's tools.
    """

    conversation_id: str
    agent: str
    model: str
    version: str
    tools: tuple[str, ...] = ()
    turns: tuple[DialogueTurn, ...] = field(default=(), repr=False)

    @property
    def task(self) -> str:
        """The first user message."""
        return next((turn.content for turn in self.turns if turn.role == "user"), "")

    @property
    def last_message(self) -> str:
        """The agent's final message: that of its finish, or its last text."""
        for turn in reversed(self.turns):
            if turn.role != "assistant":
                continue
            for call in turn.calls:
                if isinstance(message := call.arguments.get("message"), str) and call.name == "finish":
                    return message
            if turn.content:
                return turn.content
        return ""


def to_dialogue(conversation_id: str, events: Sequence[Event]) -> Dialogue:
    """Return a log as a dialogue.

    Args:
        events: whole, from the first one on.
    """
    without = find_rolled_back(events)
    kept = [event for event in events if event.id not in without]
    created = next((event for event in kept if isinstance(event, ConversationCreated)), None)
    system = next((event for event in kept if isinstance(event, SystemMessageAction)), None)
    turns = [turn for event in kept if (turn := _turn(event)) is not None]
    turns.sort(key=lambda turn: turn.role != "system")  # the log has the first message before it
    replies = [turn.reply for turn in turns if turn.reply is not None]
    return Dialogue(
        conversation_id,
        created.agent.name if created is not None else "",
        replies[0].model if replies else "",
        system.version if system is not None else "",
        (system.tools or ()) if system is not None else (),
        tuple(turns),
    )


def _turn(event: Event) -> DialogueTurn | None:
    match event:
        case SystemMessageAction():
            return DialogueTurn("system", event.content, event.timestamp)
        case MessageAction() if event.source is EventSource.USER:
            return DialogueTurn("user", event.content, event.timestamp, images=tuple(event.image_urls or ()))
        case ModelReply() if event.service == "agent":
            calls = tuple(
                DialogueCall(call.id, call.name, _parse_arguments(call.arguments)) for call in event.tool_calls
            )
            blocks = (block.get("thinking") or block.get("text") for block in event.thinking_blocks)
            thinking = "\n".join(text for text in blocks if isinstance(text, str))
            return DialogueTurn("assistant", event.content, event.timestamp, calls, thinking=thinking, reply=event)
        case Observation() if event.tool_call_metadata is not None:
            called = event.tool_call_metadata
            content = event.agent_text or event.content or event.sentence
            return DialogueTurn(
                "tool", content, event.timestamp, call_id=called.tool_call_id, name=called.function_name
            )
    return None


def _parse_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; text that is not a JSON object is put under `_raw`."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {"_raw": text}
    return found if isinstance(found, dict) else {"_raw": text}


def format_time(moment: datetime | None) -> str | None:
    """Format a time in ISO 8601."""
    return None if moment is None else moment.isoformat()
