"""Provider-neutral messages to and from a model, with tool calls in a form that providers accept.

A model may write an invalid name or invalid JSON, and another provider's ids have another format. A provider that gets
such a history refuses this request and every later one.

Holds: valid names, ids and arguments stay unchanged. Different names and ids stay different. Arguments become strict
JSON, whatever the model wrote. Values are frozen, so a backend may cache their serialized form as long as they live.
Does not: store messages. The log contains events; messages are built from them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
        tool_calls: an assistant's calls, in the order written.
        tool_call_id: for a tool result: the call that it answers.
        name: the tool of a tool result.
        thinking_blocks: for an assistant: the blocks as the provider sent them, with signatures; they are sent back
            unchanged.
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


NAME_LIMIT_CHARS = 64
"""OpenAI's limit; Anthropic accepts 128."""
MALFORMED_ARGUMENTS_KEY = "malformed_arguments"

_OTHER = re.compile(r"[^a-zA-Z0-9_-]")


def to_valid_name(name: str) -> str:
    """Return a name or an id reduced to letters, digits, `_` and `-`, 1 to 64 characters long."""
    if name and len(name) <= NAME_LIMIT_CHARS and not _OTHER.search(name):
        return name
    mark = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{_OTHER.sub('_', name)[: NAME_LIMIT_CHARS - 9]}_{mark}"


def make_ids_distinct(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages in which call ids are unique, for servers that restart their numbering in each reply."""
    ids = [call.id for message in messages for call in message.tool_calls]
    if len(set(ids)) == len(ids):
        return messages
    taken: set[str] = set()
    renamed: dict[str, str] = {}
    distinct = []
    for message in messages:
        if message.tool_calls:
            renamed = {call.id: _find_free_id(call.id, taken) for call in message.tool_calls}
            taken |= set(renamed.values())
            calls = tuple(replace(call, id=renamed[call.id]) for call in message.tool_calls)
            distinct.append(message if calls == message.tool_calls else replace(message, tool_calls=calls))
        elif message.tool_call_id is not None and renamed.get(message.tool_call_id, "") != message.tool_call_id:
            call_id = renamed.get(message.tool_call_id, message.tool_call_id)
            distinct.append(replace(message, tool_call_id=call_id))
        else:
            distinct.append(message)
    return distinct


def _find_free_id(call_id: str, taken: set[str]) -> str:
    number = 1
    tried = call_id
    while tried in taken:
        number += 1
        tried = f"{call_id}_{number}"
    return tried


def to_arguments_object(arguments: str) -> dict[str, Any]:
    """Return the arguments; if the text is not a JSON object, the text under a separate key."""
    try:
        parsed = json.loads(arguments or "{}", parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {MALFORMED_ARGUMENTS_KEY: arguments}


def to_arguments_text(arguments: str) -> str:
    """Return the text unchanged, or re-encoded as JSON if it is not a JSON object."""
    found = to_arguments_object(arguments)
    is_kept = bool(arguments) and MALFORMED_ARGUMENTS_KEY not in found
    return arguments if is_kept else json.dumps(found, ensure_ascii=False)


def _refuse(name: str) -> Any:
    """Reject NaN and the infinities, which Python parses but JSON forbids. Sent back, they fail the request."""
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is too large")
    return number
