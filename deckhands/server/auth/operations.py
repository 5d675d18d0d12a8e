"""The record of operations through the server: author, target and reason.

Holds: an entry is written before its operation is performed, so every operation has one.
Does not: record how an operation ended; the log of the conversation does, if it has one.
Keys: `deck:{0}:operations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from broker.runtime import from_millis
from broker.store import Store, decode_fields

MAX_ENTRIES = 100_000


@dataclass(frozen=True, slots=True)
class Operation:
    """One entry; `id` is its position in the record."""

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
        fields = ("author", author, "tenant", tenant, "action", action, "target", target, "reason", reason)
        command = ("XADD", self._key, "MAXLEN", "~", MAX_ENTRIES, "*", *fields)
        await self._store.call(*command)

    async def latest(self, *, before: str = "", limit: int = 100) -> list[Operation]:
        """Return entries, newest first.

        Args:
            before: the id of an entry; only older entries are returned.
        """
        if before and not before.replace("-", "").strip("0"):
            return []  # no entry is older, and the store refuses the query
        end = f"({before}" if before else "+"
        command = ("XREVRANGE", self._key, end, "-", "COUNT", limit)
        found = await self._store.call(*command)
        entries = [(entry_id.decode(), decode_fields(flat)) for entry_id, flat in found]
        names = ("author", "tenant", "action", "target", "reason")
        return [
            Operation(entry_id, from_millis(int(entry_id.partition("-")[0])), *(kept.get(name, "") for name in names))
            for entry_id, kept in entries
        ]
