"""The workers of a cluster for the metrics: role, heartbeat, figures, and the streams that they read.

Holds: at most `MAX_WORKERS`; a role is one of `ROLES` or `other`, whatever a worker reports.
Keys: reads `deck:{0}:workers` and `deck:{0}:worker:<w>:about`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from broker.coordination import FIELD, LabeledValues, read_figures
from broker.store import Store, decode_text, parse_number, read_tolerantly, to_pairs
from deckhands.operations.monitoring.families import MAX_WORKERS, OTHER

ROLES = frozenset(("controller", "tool", "ingress", "jobs", "server"))
MAX_NAME_CHARS = 200
MAX_STREAMS = 200


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """One worker.

    Attributes:
        left_seconds: time until its heartbeat expires; not positive once it has expired.
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
