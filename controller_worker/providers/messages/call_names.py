"""Names and ids of tool calls in a form that providers accept.

A model may write an invalid name, and another provider's ids have another format. A provider that gets such a history
refuses this request and every later one.

Holds: valid names and ids stay unchanged. Different ones stay different.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace

from controller_worker.providers.messages.messages import Message

NAME_LIMIT_CHARS = 64
"""OpenAI's limit; Anthropic accepts 128."""

_OTHER = re.compile(r"[^a-zA-Z0-9_-]")


def fitting(name: str) -> str:
    """Return a name or an id reduced to letters, digits, `_` and `-`, 1 to 64 characters long."""
    if name and len(name) <= NAME_LIMIT_CHARS and not _OTHER.search(name):
        return name
    mark = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{_OTHER.sub('_', name)[: NAME_LIMIT_CHARS - 9]}_{mark}"


def with_distinct_ids(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages in which call ids are unique, for servers that restart their numbering in each reply."""
    ids = [call.id for message in messages for call in message.tool_calls]
    if len(set(ids)) == len(ids):
        return messages
    taken: set[str] = set()
    renamed: dict[str, str] = {}
    distinct = []
    for message in messages:
        if message.tool_calls:
            renamed = {call.id: _distinct(call.id, taken) for call in message.tool_calls}
            taken |= set(renamed.values())
            calls = tuple(replace(call, id=renamed[call.id]) for call in message.tool_calls)
            distinct.append(message if calls == message.tool_calls else replace(message, tool_calls=calls))
        elif message.tool_call_id is not None and renamed.get(message.tool_call_id, "") != message.tool_call_id:
            call_id = renamed.get(message.tool_call_id, message.tool_call_id)
            distinct.append(replace(message, tool_call_id=call_id))
        else:
            distinct.append(message)
    return distinct


def _distinct(call_id: str, taken: set[str]) -> str:
    number = 1
    tried = call_id
    while tried in taken:
        number += 1
        tried = f"{call_id}_{number}"
    return tried
