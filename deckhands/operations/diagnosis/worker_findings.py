"""Check the workers of a cluster: heartbeats, versions, delays, and the waits in their queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from broker.coordination import FIELD, ROLES, WALL_FIELD, read_figures
from broker.runtime import format_count, read_version
from broker.store import (
    WORKER_FIELD,
    FunctionsVersion,
    Store,
    decode_text,
    own_version,
    parse_number,
    read_tolerantly,
    to_pairs,
)
from deckhands.operations.diagnosis.diagnostics import Finding, failed_finding, passed_finding, warning_finding
from deckhands.operations.monitoring.queues import Depth, read_depths

WORKERS, VERSIONS, CLOCKS, LAG, QUEUES = "workers", "workers' versions", "workers' clocks", "lag", "queues"
MOST_WORKERS = 2_000
CLOCK_SECONDS = 5.0
"""A worker reports its clock every 1.5 seconds; a larger difference, less a slow answer, means a wrong clock."""
LAG_SECONDS = 1.0
QUEUE_SECONDS = 120.0
SHOWN = 5


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's report about itself.

    Attributes:
        left_seconds: time until its heartbeat expires; negative after that.
        clock_seconds: how far its clock is ahead of the server's, corrected by the age of its report; None if not
            reported.
    """

    worker_id: str
    role: str
    left_seconds: float
    version: str
    clock_seconds: float | None
    lag_seconds: float
    routes: frozenset[str]


async def read_workers(store: Store) -> list[WorkerReport]:
    """Return the workers of the first shard. Only reads; calls no function."""
    names = store.all_shards[0]
    commands = [
        *(("TIME",), ("HMGET", f"{names.root}:clock", "wall", "now")),
        ("ZREVRANGE", names.workers, 0, MOST_WORKERS - 1, "WITHSCORES"),
    ]
    time, clock, flat = await read_tolerantly(store.connection, commands)
    wall_ms = parse_number(time[0]) * 1000 + parse_number(time[1]) / 1000 if isinstance(time, list) else 0.0
    kept = [parse_number(each) for each in clock] if isinstance(clock, list) and all(clock) else [wall_ms, wall_ms]
    now_ms = kept[1] + max(0.0, wall_ms - kept[0])
    ids = [decode_text(one) for one in flat[::2]] if isinstance(flat, list) else []
    deadlines = [parse_number(one) for one in flat[1::2]] if isinstance(flat, list) else []
    hashes = await read_tolerantly(store.connection, [("HGETALL", names.worker_facts(one)) for one in ids])
    return [
        _parse_report(name, (deadline - now_ms) / 1000, to_pairs(about), wall_ms, names.root)
        for name, deadline, about in zip(ids, deadlines, hashes, strict=True)
    ]


def _parse_report(name: str, left: float, about: Mapping[str, object], wall_ms: float, root: str) -> WorkerReport:
    figures = read_figures(decode_text(about.get(FIELD)))
    said = parse_number(about.get(WALL_FIELD))
    begins = (f"{root}:act:interactive:", f"{root}:act:")
    streams = decode_text(about.get("streams")).split()
    return WorkerReport(
        name,
        decode_text(about.get("role")),
        left,
        decode_text(about.get(WORKER_FIELD)),
        (said - wall_ms) / 1000 if said else None,
        figures.get("loop_lag_seconds", {}).get("", 0.0),
        frozenset(one.removeprefix(begins[0]).removeprefix(begins[1]) for one in streams if one.startswith(begins)),
    )


def check_workers(workers: Sequence[WorkerReport], *, unsettled: int) -> list[Finding]:
    """Check the workers.

    Args:
        unsettled: how many conversations may need a worker.
    """
    alive = [worker for worker in workers if worker.left_seconds > 0]
    return [
        *_check_presence(workers, alive, unsettled),
        *_check_versions(alive),
        *_check_clocks(alive),
        *_check_lag(alive),
    ]


def _check_presence(workers: Sequence[WorkerReport], alive: Sequence[WorkerReport], unsettled: int) -> list[Finding]:
    findings = []
    counts = Counter(worker.role for worker in alive)
    for role in ROLES:
        if not counts[role]:
            remedy = f"Start one: `deckhands up`, or `deckhands {'controller' if role == 'controller' else 'tools'}`."
            if unsettled:
                waits = f"{format_count(unsettled, 'conversation')} may need one"
                findings.append(failed_finding(WORKERS, f"no {role} worker is alive, and {waits}", remedy))
            else:
                findings.append(warning_finding(WORKERS, f"no {role} worker is alive", remedy))
    lapsed = [worker for worker in workers if worker.left_seconds <= 0]
    if lapsed:
        findings.append(
            warning_finding(
                WORKERS,
                f"{format_count(len(lapsed), 'worker')} without heartbeat: "
                f"{_join_names(worker.worker_id for worker in lapsed)}",
                "Other workers take over their work within seconds. See their logs, and the kernel's, for the cause.",
            )
        )
    reported = ", ".join(f"{number} {role or 'unknown'}" for role, number in sorted(counts.items()))
    return findings or [passed_finding(WORKERS, f"alive: {reported}")]


def _check_versions(alive: Sequence[WorkerReport]) -> list[Finding]:
    here = f"{read_version()} {own_version().stamp}"
    others = [worker for worker in alive if worker.version != here]
    if not others:
        return [passed_finding(VERSIONS, f"all as here, {read_version()}")] if alive else []
    reported = _join_names(f"{worker.worker_id} ({_render_version(worker.version)})" for worker in others)
    detail = f"{format_count(len(others), 'worker')} of another version than here ({_render_version(here)}): {reported}"
    return [
        warning_finding(
            VERSIONS, detail, "Complete the upgrade; versions work side by side until then (docs/deployment.md)."
        )
    ]


def _render_version(said: str) -> str:
    package, _, stamp = said.rpartition(" ")
    return f"{package or 'older'}, functions {FunctionsVersion.parse(stamp)}"


def _check_clocks(alive: Sequence[WorkerReport]) -> list[Finding]:
    wrong = [one for one in alive if one.clock_seconds is not None and abs(one.clock_seconds) > CLOCK_SECONDS]
    if not wrong:
        said = [abs(one.clock_seconds) for one in alive if one.clock_seconds is not None]
        return (
            [passed_finding(CLOCKS, f"within {max(said):.1f} s of the server's, as reported every 1.5 s")]
            if said
            else []
        )
    reported = _join_names(f"{one.worker_id} ({one.clock_seconds:+.0f} s)" for one in wrong)
    detail = f"clocks differ from the server's: {reported}"
    return [
        warning_finding(
            CLOCKS, detail, "Synchronise the clocks (NTP). Keys, certificates and times in logs depend on them."
        )
    ]


def _check_lag(alive: Sequence[WorkerReport]) -> list[Finding]:
    slow = [worker for worker in alive if worker.lag_seconds > LAG_SECONDS]
    if not slow:
        return [
            passed_finding(LAG, f"loops late by {max((one.lag_seconds for one in alive), default=0.0):.1f} s at most")
        ]
    reported = _join_names(f"{worker.worker_id} ({worker.lag_seconds:.1f} s)" for worker in slow)
    remedy = "Their machines are overloaded or they hold too much: lower --concurrency, or add workers."
    return [warning_finding(LAG, f"loops are late: {reported}", remedy)]


async def check_queues(store: Store, workers: Sequence[WorkerReport]) -> list[Finding]:
    """Find queues with long waits."""
    routes = frozenset(route for worker in workers for route in worker.routes)
    return report_queues(await read_depths(store, routes, sees_inbox=False))


def report_queues(queues: Mapping[str, Depth]) -> list[Finding]:
    """Check queues by the wait of their first entry."""
    late = {name: depth for name, depth in queues.items() if depth.oldest_seconds > QUEUE_SECONDS}
    findings = []
    for name, depth in sorted(late.items()):
        kind = "controller" if name.startswith("ready") else "tool"
        detail = f"{name}: {depth.waiting + depth.in_line:,.0f} wait, the first for {depth.oldest_seconds:,.0f} s"
        findings.append(warning_finding(QUEUES, detail, f"Add {kind} workers. A pool that none serves waits for ever."))
    waiting = sum(depth.waiting + depth.in_line for depth in queues.values())
    return findings or [passed_finding(QUEUES, f"{waiting:,.0f} wait, none longer than {QUEUE_SECONDS:.0f} s")]


def _join_names(names: Iterable[str]) -> str:
    reported = list(names)
    more = f" and {len(reported) - SHOWN} more" if len(reported) > SHOWN else ""
    return ", ".join(ascii(name)[1:-1] for name in reported[:SHOWN]) + more
