"""Counts of conversations by state and wait reason, recomputed periodically and cached.

Holds: a count reads the newest `MOST_COUNTED` conversations, `PAGE` at a time; the number left out is known. Labels
come from fixed sets of states and reasons, whatever is in the store.
Keys: reads `deck:{k}:index` and `deck:{k}:c:<id>:meta`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from broker.contract import AgentState
from broker.log import WaitReason
from broker.store import ConversationKeys, Store, decode_text, parse_number, read_tolerantly
from deckhands.operations.monitoring.families import OTHER

PAGE = 500
MOST_COUNTED = 50_000
RECOUNT_SECONDS = 15.0
STATES = frozenset(state.value for state in AgentState)
WAIT_REASONS = frozenset(("", *(reason.value for reason in WaitReason)))


@dataclass(frozen=True, slots=True)
class Count:
    """One count; `at` is its time on the monotonic clock."""

    at: float
    by_state: Counter[tuple[str, str]] = field(default_factory=Counter)
    uncounted: int = 0


class Census:
    """Counts the conversations of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._latest: Count | None = None

    async def count(self) -> Count:
        """Return the latest count, recomputed if it is old.

        Raises:
            StoreError: the store does not answer.
        """
        now = self._store.clock.monotonic()
        if self._latest is None or now - self._latest.at >= RECOUNT_SECONDS:
            self._latest = await self._count_now(now)
        return self._latest

    async def _count_now(self, now: float) -> Count:
        found, names = Count(now), await self._store.load_shards()
        sizes = await read_tolerantly(self._store.connection, [("ZCARD", shard.index) for shard in names])
        left = MOST_COUNTED
        for shard, size in zip(names, sizes, strict=True):
            start = 0
            while start < min(parse_number(size), MOST_COUNTED) and left > 0:
                ids = (
                    await read_tolerantly(self._store.connection, [("ZREVRANGE", shard.index, start, start + PAGE - 1)])
                )[0]
                if not ids:
                    break
                keys = [ConversationKeys(shard, decode_text(cid)).meta for cid in ids]
                rows = await read_tolerantly(
                    self._store.connection, [("HMGET", key, "state", "wait_reason") for key in keys]
                )
                found.by_state.update(_parse_labels(row) for row in rows)
                start, left = start + len(ids), left - len(ids)
        total = int(sum(map(parse_number, sizes)))
        return Count(found.at, found.by_state, max(0, total - found.by_state.total()))


def _parse_labels(row: object) -> tuple[str, str]:
    state, reason = map(decode_text, row) if isinstance(row, list) else ("", "")
    return state if state in STATES else OTHER, reason if reason in WAIT_REASONS else OTHER
