"""Caches values derived from messages, such as their wire bytes, as long as the `Message` lives.

A request whose history only grew then costs little more than its tail. For 2,000 messages that is a tenth of the time
an SDK takes to walk and serialise them.

Holds: a message is never confused with a later one at the same memory address. No value outlives its message.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from controller_worker.providers.messages.messages import Message

Made = TypeVar("Made")


class _MemoEntry(weakref.ref[Message]):
    """A value derived from a message. It does not keep the message alive."""

    __slots__ = ("key", "made")
    key: int
    made: Any


class MessageMemo(Generic[Made]):
    """Derives a value from each message once."""

    def __init__(self) -> None:
        self._made: dict[int, _MemoEntry] = {}
        self._forget = partial(_forget, self._made)

    def __len__(self) -> int:
        return len(self._made)

    def of(self, message: Message, make: Callable[[Message], Made]) -> Made:
        """Return the value derived from the message, from the cache if present."""
        key = id(message)
        entry = self._made.get(key)
        if entry is None or entry() is not message:
            made = make(message)
            # Each conversation has many of these. A closure for each would take more memory than the value.
            entry = self._made[key] = _MemoEntry(message, self._forget)
            entry.key = key
            entry.made = made
        found: Made = entry.made
        return found


def _forget(made: dict[int, _MemoEntry], entry: _MemoEntry) -> None:
    if made.get(entry.key) is entry:
        del made[entry.key]


class WrittenMessages(MessageMemo[bytes]):
    """Serializes each message once."""

    def __init__(self, write: Callable[[Message], bytes]) -> None:
        super().__init__()
        self._write = write

    def bytes_of(self, message: Message) -> bytes:
        """Return the message's bytes."""
        return self.of(message, self._write)


def json_bytes(value: Any) -> bytes:
    """Return a value as compact JSON. A lone surrogate, which UTF-8 cannot encode, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
