"""Robust reads from the store: streams as one consumer of a group, and values that may have a wrong type.

Holds: an entry delivered to this consumer reaches its caller even if the reply was lost. After a lost reply or an
outage, the consumer first reads its pending entries again. An entry may therefore arrive twice, and the caller must
claim before it acts. In a tolerant read, unusable values count as missing: a key of the wrong type affects no other
reply. It is not retried while the store is unavailable.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Any

from broker.runtime import OutcomeUnknown, StoreRefused, StoreUnavailable
from broker.store.connection import Argument, Connection
from broker.store.store import Store

BLOCK_SECONDS = 4.0
HEARTBEAT_SECONDS = 0.3
MISSING_STREAM_ERRORS = ("The store answered: WRONGTYPE", "The store answered: NOGROUP")
"""The stream was overwritten or removed. The next sweep moves the wrong key away and creates the stream again."""

_log = logging.getLogger(__name__)

StreamEntry = tuple[bytes, bytes, list[bytes]]
"""Stream, entry id, and a flat list of fields and values."""


class GroupReader:
    """One consumer of streams of one shard."""

    def __init__(self, store: Store, group: str, consumer: str, streams: Sequence[str]) -> None:
        self._store = store
        self._group = group
        self._consumer = consumer
        self._streams = list(streams)
        self._pending_after: dict[str, str] = {}
        self._connection = store.connection.another(reply_timeout_seconds=BLOCK_SECONDS + 5)
        self._connects = store.connection.connects

    async def read(self, *, limit: int) -> list[StreamEntry]:
        """Wait up to `BLOCK_SECONDS` and return the newly delivered entries, at most `limit` from each stream."""
        entries = await self._store.retry(lambda: self._read(limit))
        return [entry for entry in entries if entry[2]]

    async def aclose(self) -> None:
        """Close its connection."""
        await self._connection.aclose()

    async def _read(self, limit: int) -> list[StreamEntry]:
        # A store restored to an older state does not deliver its pending entries again. Calls of this connection need
        # not have failed: it may have been idle.
        if self._connects != (connects := self._store.connection.connects):
            self._connects = connects
            self._pending_after = dict.fromkeys(self._streams, "0")
        after = [self._pending_after.get(stream, ">") for stream in self._streams]
        command: list[Argument] = ["XREADGROUP", "GROUP", self._group, self._consumer, "COUNT", limit]
        command += ["BLOCK", int(BLOCK_SECONDS * 1000), "STREAMS", *self._streams, *after]
        try:
            found = await self._connection.call(*command)
        except (OutcomeUnknown, StoreUnavailable):
            self._pending_after = dict.fromkeys(self._streams, "0")
            raise
        except StoreRefused as error:
            await self._store.check_generation()  # the usual reason for a missing group, and the clearer error
            if not error.message.startswith(MISSING_STREAM_ERRORS):
                raise
            _log.warning("a stream of the consumer %s is missing: %s", self._consumer, error)
            await asyncio.sleep(HEARTBEAT_SECONDS)
            return []  # pending entries were not read yet
        entries = [(stream, entry_id, fields) for stream, items in found or () for entry_id, fields in items]
        # Page through the pending entries; a stream without more of them returns to new entries.
        last = {stream.decode(): entry_id.decode() for stream, entry_id, _ in entries}
        self._pending_after = {stream: last[stream] for stream in self._pending_after if stream in last}
        return entries


LARGEST = 2.0**53


async def read_tolerantly(connection: Connection, commands: Sequence[Sequence[Argument]]) -> list[Any]:
    """Return the replies to commands; None for refused commands.

    Raises:
        StoreError: the store does not answer.
    """
    try:
        return await connection.call_many(commands)
    except StoreRefused:
        replies = await asyncio.gather(*(connection.call(*command) for command in commands), return_exceptions=True)
    for reply in replies:
        if isinstance(reply, BaseException) and not isinstance(reply, StoreRefused):
            raise reply
    return [None if isinstance(reply, BaseException) else reply for reply in replies]


def parse_number(found: Any) -> float:
    """Parse a non-negative number; 0 if invalid."""
    try:
        value = float(found)
    except (TypeError, ValueError):
        return 0.0
    return min(max(value, 0.0), LARGEST) if math.isfinite(value) else 0.0


def decode_text(found: Any) -> str:
    """Decode a text; empty if invalid."""
    return found.decode(errors="replace") if isinstance(found, bytes) else ""


def to_pairs(flat: Any) -> dict[str, Any]:
    """Convert a flat reply to a dictionary with decoded names."""
    if not isinstance(flat, list) or len(flat) % 2:
        return {}
    return dict(zip(map(decode_text, flat[::2]), flat[1::2], strict=True))
