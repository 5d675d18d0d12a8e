"""The record of operations through the server: author, target and reason.

Holds: an entry is written before its operation is performed, so every operation has one. The server's user of the store
can add entries, but neither change nor remove any (`deploy/store.acl`). So this is a list, which has a command that
only adds (`RPUSH`), and not a stream, where adding can also trim.
Does not: record the result of an operation; the log of the conversation, if there is one, does. The job `operations`
removes old entries. Who may forge it: the server and the operator can add entries with any author; entries that cannot
be read are left out.
Keys: `deck:{0}:operations:record`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from broker.runtime import from_millis, to_millis
from broker.store import Store

READ_AT_ONCE = 1_000
MAX_MILLIS = 10**15 - 1
NAMES = ("author", "tenant", "action", "target", "reason")


@dataclass(frozen=True, slots=True)
class Operation:
    """One entry; `id` is its time in milliseconds and its position in the record, `<ms>-<position>`."""

    id: str
    at: datetime
    author: str
    tenant: str
    action: str
    target: str
    reason: str


class Operations:
    """The record of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._key = store.all_shards[0].operations

    async def record(self, author: str, tenant: str, action: str, target: str, reason: str) -> None:
        """Add an entry. If the reply is lost, the entry may be added twice."""
        fields = dict(zip(NAMES, (author, tenant, action, target, reason), strict=True))
        entry = {"at": to_millis(self._store.clock.now()), **fields}
        await self._store.call("RPUSH", self._key, json.dumps(entry))

    async def latest(self, *, before: str = "", limit: int = 100) -> list[Operation]:
        """Return entries, newest first.

        Args:
            before: the id of an entry; only older entries are returned.
        """
        end = await self._store.call("LLEN", self._key)
        latest_ms = MAX_MILLIS
        if before:
            text, _, number = before.partition("-")
            latest_ms, position = int(text), int(number)
            known = _parse(position, await self._store.call("LINDEX", self._key, position)) if position < end else None
            if known is not None and known.id == before:
                end = position
            else:
                latest_ms -= 1  # the record was trimmed since, or there is no such entry
        found: list[Operation] = []
        while end > 0 and len(found) < limit:
            start = max(0, end - READ_AT_ONCE)
            texts = await self._store.call("LRANGE", self._key, start, end - 1)
            entries = [_parse(start + at, text) for at, text in enumerate(texts)]
            found += [
                one for one in reversed(entries) if one is not None and int(one.id.partition("-")[0]) <= latest_ms
            ]
            end = start
        return found[:limit]


def _parse(position: int, text: bytes | None) -> Operation | None:
    """Parse an entry; None if it is missing or unreadable."""
    try:
        entry = json.loads(text or b"")
        if isinstance(entry, Mapping) and isinstance(at_ms := entry.get("at"), int) and 0 <= at_ms <= MAX_MILLIS:
            return Operation(f"{at_ms}-{position}", from_millis(at_ms), *(str(entry.get(name, "")) for name in NAMES))
    except (ValueError, OverflowError, OSError, RecursionError):
        pass
    return None
