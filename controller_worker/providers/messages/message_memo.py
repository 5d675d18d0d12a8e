"""Caches values derived from messages, such as their wire bytes, as long as the `Message` lives.

A request whose history only grew then costs little more than its tail. For 2,000 messages that is a tenth of the time
an SDK takes to walk and serialise them.

Holds: a message is never confused with a later one at the same memory address. No value outlives its message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, TypeVar

from broker.contract import ToolSpec
from controller_worker.providers.messages.messages import Message

Made = TypeVar("Made")

FORGET_AFTER_SECONDS = 10.0
"""An answer that has taken so long may take as long again. To write a history again takes milliseconds, and its bytes
are most of what a waiting call holds."""
TOOL_LISTS_LIMIT = 64
"""The lists of tools that a client keeps in their wire form."""


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

    def list_bytes(self, messages: Iterable[Message], *, besides: Collection[int] = ()) -> list[bytes]:
        """Return the bytes of each message; called for the whole history of each request.

        Args:
            besides: ids of messages whose bytes are not needed and are returned empty.
        """
        made = self._made
        of = self.of
        write = self._write
        found = []
        for message in messages:
            key = id(message)
            entry = made.get(key)
            if entry is not None and entry() is message:
                found.append(entry.made)
            else:
                found.append(b"" if key in besides else of(message, write))
        return found

    @contextlib.contextmanager
    def forget_if_slow(
        self, messages: Sequence[Message], *, after_seconds: float = FORGET_AFTER_SECONDS
    ) -> Iterator[None]:
        """Forget the bytes of a request's messages if its answer takes long; the next request writes them again."""
        timer = asyncio.get_running_loop().call_later(after_seconds, self._drop, messages)
        try:
            yield
        finally:
            timer.cancel()

    def _drop(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._made.pop(id(message), None)


@dataclass(frozen=True, slots=True)
class WrittenValue:
    """A value that is already JSON; see `write_fields`."""

    content: bytes


class WrittenTools:
    """Serializes each list of tools once. Their schemas are most of a short request.

    Args:
        write: returns the plain values of tools.
    """

    def __init__(self, write: Callable[..., Any]) -> None:
        self._write = write
        self._written: dict[tuple[bool, tuple[int, ...]], tuple[Sequence[ToolSpec], WrittenValue]] = {}

    def value_of(self, tools: Sequence[ToolSpec], *, is_strict: bool) -> WrittenValue:
        """Return the JSON of the tools."""
        key = is_strict, tuple(map(id, tools))
        if key not in self._written:
            if len(self._written) >= TOOL_LISTS_LIMIT:
                self._written.clear()
            # The tools are kept, so that no other tool gets one of their ids.
            self._written[key] = tuple(tools), WrittenValue(json_bytes(self._write(tools, is_strict=is_strict)))
        return self._written[key][1]


def write_fields(fields: Mapping[str, Any]) -> bytes:
    """Return the inside of a JSON object, as `json_bytes` writes it, except that written values stay as they are."""
    return b",".join(
        [
            _write_name(name) + (value.content if isinstance(value, WrittenValue) else json_bytes(value))
            for name, value in fields.items()
        ]
    )


@cache
def _write_name(name: str) -> bytes:
    """Return the name of a request's field as JSON. Cached, because there are few names."""
    return json_bytes(name) + b":"


def json_bytes(value: Any) -> bytes:
    """Return a value as compact JSON. A lone surrogate, which UTF-8 cannot encode, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
