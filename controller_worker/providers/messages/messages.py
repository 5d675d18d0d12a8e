"""Provider-neutral messages to and from a model.

Holds: values are frozen, so a backend may cache their serialized form as long as they live.
Does not: get stored. The log holds events; messages are built from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of a message."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image of a message, by `https:` address or as a `data:` URL in base64."""

    url: str


NOT_SEEN = TextPart("[An image was left out here: this model cannot see images.]")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as the model wrote it.

    Attributes:
        id: unique within its reply; the result refers to it.
        name: the tool's name, known or not.
        arguments: the raw text, usually JSON.
        problem: why the call cannot run, as a text for the model; empty if no problem is known.
    """

    id: str
    name: str
    arguments: str
    problem: str = ""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: the author; `tool` is the result of one tool call.
        content: parts in order; empty for an assistant that only calls tools.
        tool_calls: of an assistant, in the order written.
        tool_call_id: of a tool result, the call it answers.
        name: of a tool result, the tool.
        thinking_blocks: of an assistant, as the provider sent them, including signatures; sent back unchanged.
    """

    role: Role
    content: tuple[TextPart | ImagePart, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    thinking_blocks: tuple[Mapping[str, Any], ...] = ()


def has_images(message: Message) -> bool:
    """Return whether the message contains an image. A request asks this of its whole history."""
    for part in message.content:  # noqa: SIM110  (a generator for each message takes three times as long)
        if isinstance(part, ImagePart):
            return True
    return False
