"""What was made of messages, such as their bytes on the wire, remembered for as long as their `Message` lives.

A request whose history has only grown then costs little more than its tail: of 2,000 messages, a tenth of what an SDK
takes to walk and serialise them.

Holds: a message is never confused with a later one at the same address; nothing outlives its message.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from controller_worker.providers.messages.messages import Message

Made = TypeVar("Made")


class _Made(weakref.ref[Message]):
    """What was made of a message, which it does not keep alive."""

    __slots__ = ("key", "made")
    key: int
    made: Any


class MessageMemo(Generic[Made]):
    """Makes something of each message once."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}
        self._forget = partial(_forget, self._made)

    def __len__(self) -> int:
        return len(self._made)

    def of(self, message: Message, make: Callable[[Message], Made]) -> Made:
        """Return what was made of the message, now or before."""
        key = id(message)
        entry = self._made.get(key)
        if entry is None or entry() is not message:
            made = make(message)
            # Each conversation has many: a closure beside each would take more memory than what was made.
            entry = self._made[key] = _Made(message, self._forget)
            entry.key, entry.made = key, made
        found: Made = entry.made
        return found


def _forget(made: dict[int, _Made], entry: _Made) -> None:
    if made.get(entry.key) is entry:
        del made[entry.key]


class WrittenMessages(MessageMemo[bytes]):
    """Writes each message once."""

    def __init__(self, write: Callable[[Message], bytes]) -> None:
        super().__init__()
        self._write = write

    def bytes_of(self, message: Message) -> bytes:
        """Return the message's bytes."""
        return self.of(message, self._write)


def json_bytes(value: Any) -> bytes:
    """Write a value as compact JSON. A lone surrogate, which UTF-8 cannot hold, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
