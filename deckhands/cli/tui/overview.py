"""The cluster in the head of `top`: workers, queues with their ages, conversations by state. Read every few seconds.

Holds: everything except `ClusterOverview.refresh` is pure; every text is cleaned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from broker.store import Store
from deckhands.cli.tui.conversation_cache import CachedConversation
from deckhands.client import clean_line, format_duration, format_short_number
from deckhands.operations import Depth, WorkerMetrics, read_depths, read_workers

LEAST_RATE_SECONDS = 0.5
WAITING = ("awaiting_user_input", "awaiting_user_confirmation")


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The cluster at one moment.

    Attributes:
        steps_per_second, usd_per_hour: between the last two readings; None after the first.
    """

    workers: Sequence[WorkerMetrics] = ()
    queues: dict[str, Depth] = field(default_factory=dict)
    steps_per_second: float | None = None
    usd_per_hour: float | None = None

    @property
    def controllers(self) -> list[str]:
        """The names of the controller workers."""
        return [worker.name for worker in self.workers if worker.role == "controller"]


class ClusterOverview:
    """Reads workers and queues."""

    def __init__(self, store: Store) -> None:
        self.facts = ClusterFacts()
        self._store = store
        self._before: tuple[float, dict[str, float], dict[str, float]] | None = None

    async def refresh(self) -> None:
        """Read them again.

        Raises:
            StoreError: the store does not answer.
        """
        found = await read_workers(self._store)
        routes = {route for worker in found for route in worker.routes}
        queues = await read_depths(self._store, routes)
        now = self._store.clock.monotonic()
        steps, cost = _sums(found, "steps"), _sums(found, "cost_usd")
        rates: tuple[float | None, float | None] = (None, None)
        if self._before is not None and now - self._before[0] >= LEAST_RATE_SECONDS:
            seconds = now - self._before[0]
            rates = (_increase(self._before[1], steps) / seconds, _increase(self._before[2], cost) / seconds * 3600)
        self._before = (now, steps, cost)
        self.facts = ClusterFacts(found, queues, *rates)


def _sums(found: Iterable[WorkerMetrics], name: str) -> dict[str, float]:
    """Return a figure of each worker, summed over its labels."""
    return {worker.name: sum(worker.figures.get(name, {}).values()) for worker in found}


def _increase(before: dict[str, float], after: dict[str, float]) -> float:
    """Return the growth of the figures, summed over the workers in both readings."""
    return sum(max(0.0, after[name] - before[name]) for name in after if name in before)


def worker_line(facts: ClusterFacts) -> str:
    """Return the workers in one line: how many are alive by role, their load, and how many are silent."""
    parts = []
    for role in dict.fromkeys(worker.role for worker in facts.workers):
        own = [worker for worker in facts.workers if worker.role == role]
        alive = [worker for worker in own if worker.left_seconds > 0]
        held = sum(sum(worker.figures.get("conversations", {}).values()) for worker in alive)
        running = sum(sum(worker.figures.get("running", {}).values()) for worker in alive)
        busy = [f"{held:.0f} held"] if held else []
        busy += [f"{running:.0f} running"] if running else []
        busy += [f"{len(own) - len(alive)} silent"] if len(own) > len(alive) else []
        parts.append(f"{clean_line(role)} {len(alive)}" + (f" ({', '.join(busy)})" if busy else ""))
    return "Workers: " + (" · ".join(parts) or "none")


def queue_line(facts: ClusterFacts) -> str:
    """Return the non-empty queues, each with the age of its oldest entry."""
    parts = []
    for name, depth in facts.queues.items():
        waiting = depth.waiting + depth.in_line
        if waiting:
            age = f" (oldest {format_duration(depth.oldest_seconds)})" if depth.oldest_seconds else ""
            parts.append(f"{clean_line(name)} {format_short_number(int(waiting))}{age}")
    return "Queues: " + (" · ".join(parts) or "empty")


def conversation_line(rows: Iterable[CachedConversation], facts: ClusterFacts) -> str:
    """Return the conversations by state, their reasons for waiting, and their speed."""
    states, waits = Counter[str](), Counter[str]()
    for row in rows:
        states[row.state] += 1
        if row.wait_reason:
            waits[row.wait_reason] += 1
    parts = [f"{number:,} {state.replace('_', ' ')}" for state, number in states.most_common()]
    parts += [f"{number:,} wait for {reason.replace('_', ' ')}" for reason, number in waits.most_common(3)]
    if facts.steps_per_second is not None:
        parts.append(f"{facts.steps_per_second:.1f} steps/s")
    if facts.usd_per_hour:
        parts.append(f"${facts.usd_per_hour:.2f}/h")
    return f"Conversations: {states.total():,}" + (f" · {' · '.join(parts)}" if parts else "")


def cluster_lines(facts: ClusterFacts) -> list[str]:
    """Return one line for each worker and each queue."""
    lines = ["Workers", ""]
    for worker in facts.workers:
        figures = {name: sum(labelled.values()) for name, labelled in worker.figures.items()}
        shown = [f"{name} {figures[name]:.0f}" for name in ("conversations", "running", "steps") if name in figures]
        shown += [f"cpu {figures['host_cpu']:.0%}"] if "host_cpu" in figures else []
        beat = "alive" if worker.left_seconds > 0 else f"silent for {format_duration(-worker.left_seconds)}"
        lines.append(f"  {clean_line(worker.role):<12}{clean_line(worker.name):<44} {beat:<20} {', '.join(shown)}")
    lines += ["", "Queues", ""]
    for name, depth in facts.queues.items():
        age = f"oldest {format_duration(depth.oldest_seconds)}" if depth.oldest_seconds else ""
        numbers = f"{depth.waiting:.0f} waiting, {depth.in_line:.0f} in line, {depth.held:.0f} with workers"
        lines.append(f"  {clean_line(name):<32}{numbers:<48}{age}")
    return lines
