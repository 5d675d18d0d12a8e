"""What was made of messages, such as their bytes on the wire, remembered for as long as their `Message` lives.

A request whose history has only grown then costs little more than its tail: of 2,000 messages, a tenth of what an SDK
takes to walk and serialise them.

Holds: a message is never confused with a later one at the same address; nothing outlives its message.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from controller_worker.messages.messages import Message

Made = TypeVar("Made")


class MessageMemo(Generic[Made]):
    """Makes something of each message once."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Message], Made]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def of(self, message: Message, make: Callable[[Message], Made]) -> Made:
        """Return what was made of the message, now or before."""
        key = id(message)
        entry = self._made.get(key)
        if entry is not None and entry[0]() is message:
            return entry[1]
        made = make(message)
        self._made[key] = (weakref.ref(message, lambda _: self._made.pop(key, None)), made)
        return made


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
