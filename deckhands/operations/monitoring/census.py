"""Counts of conversations by state and wait reason, recomputed periodically and cached.

The census of workers has the role, heartbeat, figures and streams of each.

Holds: a count reads the newest `MOST_COUNTED` conversations, `PAGE` at a time; the number left out is known. Labels
come from fixed sets of states and reasons, whatever is in the store. At most `MAX_WORKERS` workers are read; a role is
one of `ROLES` or `other`, whatever a worker reports.
Keys: reads `deck:{k}:index`, `deck:{k}:c:<id>:meta`, `deck:{0}:workers` and `deck:{0}:worker:<w>:about`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from broker.contract import AgentState
from broker.coordination import FIELD, LabeledValues, read_figures
from broker.log import WaitReason
from broker.store import ConversationKeys, Store, decode_text, parse_number, read_tolerantly, to_pairs
from deckhands.operations.monitoring.families import MAX_WORKERS, OTHER

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
        left = {shard: int(min(parse_number(size), MOST_COUNTED)) for shard, size in zip(names, sizes, strict=True)}
        starts = dict.fromkeys(left, 0)
        while (room := MOST_COUNTED - found.by_state.total()) > 0 and (
            shards := [one for one in names if left[one] > 0]
        ):
            most = -(-min(PAGE, room) // len(shards))
            pages = await read_tolerantly(
                self._store.connection,
                [("ZREVRANGE", shard.index, starts[shard], starts[shard] + most - 1) for shard in shards],
            )
            keys = []
            for shard, ids in zip(shards, pages, strict=True):
                keys += [ConversationKeys(shard, decode_text(cid)).meta for cid in ids or ()]
                starts[shard] += most
                left[shard] = left[shard] - most if ids else 0
            rows = await read_tolerantly(
                self._store.connection, [("HMGET", key, "state", "wait_reason") for key in keys[:room]]
            )
            found.by_state.update(_parse_labels(row) for row in rows)
        total = int(sum(map(parse_number, sizes)))
        return Count(found.at, found.by_state, max(0, total - found.by_state.total()))


def _parse_labels(row: object) -> tuple[str, str]:
    state, reason = map(decode_text, row) if isinstance(row, list) else ("", "")
    return state if state in STATES else OTHER, reason if reason in WAIT_REASONS else OTHER


ROLES = frozenset(("controller", "tool", "ingress", "jobs", "server"))
MAX_NAME_CHARS = 200
MAX_STREAMS = 200


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """One worker.

    Attributes:
        left_seconds: time until its heartbeat expires; 0 or negative after that.
        figures: by name and label; see `Figures`.
        routes: of the action streams that it reads.
    """

    role: str
    name: str
    left_seconds: float
    figures: Mapping[str, LabeledValues]
    routes: frozenset[str]


async def read_workers(store: Store) -> list[WorkerMetrics]:
    """Return the workers, the latest heartbeat first.

    Raises:
        StoreError: the store does not answer.
    """
    names = store.all_shards[0]
    commands = [("FCALL", "deck_now", 1, names.root), ("ZREVRANGE", names.workers, 0, MAX_WORKERS - 1, "WITHSCORES")]
    now, flat = await read_tolerantly(store.connection, commands)
    now_ms = parse_number(now[1]) if isinstance(now, list) else 0.0
    ids = [decode_text(worker) for worker in flat[::2]] if flat else []
    deadlines = [parse_number(deadline) for deadline in flat[1::2]] if flat else []
    hashes = await read_tolerantly(store.connection, [("HGETALL", names.worker_facts(worker)) for worker in ids])
    return [
        _worker(worker, (deadline - now_ms) / 1000, to_pairs(about), names.root)
        for worker, deadline, about in zip(ids, deadlines, hashes, strict=True)
    ]


def _worker(name: str, left_seconds: float, about: Mapping[str, object], root: str) -> WorkerMetrics:
    role = decode_text(about.get("role"))
    streams = decode_text(about.get("streams")).split()[:MAX_STREAMS]
    begins = (f"{root}:act:interactive:", f"{root}:act:")
    routes = {stream.removeprefix(begins[0]).removeprefix(begins[1]) for stream in streams if stream.startswith(begins)}
    return WorkerMetrics(
        role if role in ROLES else OTHER,
        name[:MAX_NAME_CHARS],
        left_seconds,
        read_figures(decode_text(about.get(FIELD))),
        frozenset(routes),
    )
