"""The limit on attempts in flight: additive increase, multiplicative decrease under overload (AIMD).

A `Pace` is one limit. It doubles until the first overload, then grows by steps. On an overload it shrinks by a fixed
share, and then waits for the effect. The pace of the machines watches the hosts' load and the sandboxes that are
starting; the pace of each model watches refusals for its quota (429) and latency.

`ClusterLoad` reads the reports of workers: the load of their machines, and their model calls since the last reading.

Holds: pure; the caller passes the time. A limit is never below its floor. A new worker's figures count from 0, those of
an existing worker from the first reading. Forged figures can only make an evaluation slower, never faster than its
ceiling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from broker.store import Store
from deckhands.operations import WorkerMetrics, read_workers

START = 8
"""The initial limit; also the lowest that load imposes on a larger ceiling."""
STEP_SHARE = 0.05
KEPT_OF_LIMIT = 0.7
QUIET_SECONDS = 10.0
"""The pause after a limit has shrunk."""

FULL_CPU, FULL_STALLED_CPU = 0.92, 0.5
HIGH_STALLED_CPU = 0.9
LITTLE_MEMORY, HARDLY_ANY_MEMORY = 0.15, 0.07
STALLED_MEMORY, HIGH_STALLED_MEMORY = 0.1, 0.3
STALLED_IO = 0.5
STARTS_PER_WORKER = 4
"""Attempts per tool worker that may wait for their first tool."""

SLOWER, AS_FAST = 3.0, 1.5
"""A latency of this many times the best, without more calls per second, indicates a queue in front of the model, if
clearly more attempts are running than at the best latency: longer prompts make calls slower, too.
"""
MORE_CALLS, MORE_ATTEMPTS = 1.1, 1.3
FEWEST_CALLS = 5


@dataclass(frozen=True, slots=True)
class Hosts:
    """The load of the most loaded machine; see `broker.runtime.host_load`. A figure is None if it is not reported.

    Attributes:
        starting: attempts that wait for their first tool.
        tool_workers: the number of tool workers.
    """

    cpu: float | None = None
    memory_free: float | None = None
    cpu_stalled: float | None = None
    memory_stalled: float | None = None
    io_stalled: float | None = None
    starting: int = 0
    tool_workers: int = 0

    @property
    def overload(self) -> str:
        """The overloaded resource that requires a lower limit; empty for none."""
        if (self.memory_free is not None) and self.memory_free < HARDLY_ANY_MEMORY:
            return f"memory of a host: {self.memory_free:.0%} is free"
        if (self.memory_stalled or 0.0) > HIGH_STALLED_MEMORY:
            return f"memory of a host: work stalls {self.memory_stalled:.0%} of the time"
        if (self.cpu_stalled or 0.0) > HIGH_STALLED_CPU and (self.cpu or 0.0) > FULL_CPU:
            return f"CPU of a host: work stalls {self.cpu_stalled:.0%} of the time"
        return ""

    @property
    def binds(self) -> str:
        """The exhausted resource that forbids a higher limit; empty for none."""
        if self.overload:
            return self.overload
        if (self.memory_free is not None) and self.memory_free < LITTLE_MEMORY:
            return f"memory of a host: {self.memory_free:.0%} is free"
        if (self.memory_stalled or 0.0) > STALLED_MEMORY:
            return f"memory of a host: work stalls {self.memory_stalled:.0%} of the time"
        if (self.cpu or 0.0) > FULL_CPU and (self.cpu_stalled is None or self.cpu_stalled > FULL_STALLED_CPU):
            return f"CPU of a host: {self.cpu:.0%} busy"
        if (self.io_stalled or 0.0) > STALLED_IO:
            return f"disks of a host: work stalls {self.io_stalled:.0%} of the time"
        if self.starting >= STARTS_PER_WORKER * max(1, self.tool_workers):
            return f"{self.starting} sandboxes that start"
        return ""


@dataclass(slots=True)
class Pace:
    """One limit.

    Attributes:
        ceiling: the upper bound.
        floor: the lower bound, below the ceiling.
        found: the limits at which an overload occurred, the latest last.
    """

    ceiling: int
    floor: int = 1
    limit: int = 0
    found: list[int] = field(default_factory=list)
    quiet_until: float = 0.0

    def __post_init__(self) -> None:
        self.limit = self.limit or min(self.ceiling, START)

    def set_ceiling(self, ceiling: int) -> None:
        """Change the ceiling; the limit is lowered at once if needed, and grows later."""
        self.ceiling = ceiling
        self.limit = min(ceiling, max(self.limit, self.floor if self.found else START))

    def grow(self, now: float, in_flight: int) -> None:
        """Raise the limit, if it is used up and there was no recent overload."""
        if in_flight < self.limit or now < self.quiet_until:
            return
        step = max(1, int(self.limit * STEP_SHARE)) if self.found else self.limit
        self.limit = min(self.ceiling, self.limit + step)

    def shrink(self, now: float, in_flight: int) -> bool:
        """Lower the limit below the number in flight, at most once in `QUIET_SECONDS`.

        Returns:
            Whether the limit was lowered.
        """
        if now < self.quiet_until or self.limit <= self.floor:
            return False
        self.quiet_until = now + QUIET_SECONDS
        used = max(1, min(self.limit, in_flight))
        self.found.append(used)
        self.limit = min(self.ceiling, max(self.floor, int(used * KEPT_OF_LIMIT)))
        return True


class HostPace:
    """The limit that follows from the machines' load."""

    def __init__(self, ceiling: int) -> None:
        self.pace = Pace(ceiling, floor=START)
        self.bound = ""

    def tick(self, now: float, in_flight: int, hosts: Hosts) -> None:
        """Adapt to the machines' load."""
        self.bound = hosts.binds
        if hosts.overload:
            self.pace.shrink(now, in_flight)
        elif not self.bound:
            self.pace.grow(now, in_flight)


@dataclass(frozen=True, slots=True)
class Calls:
    """Model calls of the whole cluster since the last reading.

    Attributes:
        refused: replies with status 429.
        answered: calls, with `seconds` of latency in total, within `over_seconds`.
    """

    refused: int = 0
    answered: int = 0
    seconds: float = 0.0
    over_seconds: float = 1.0


class ModelPace:
    """The limit for a model, inferred from its refusals and its latency."""

    def __init__(self, ceiling: int) -> None:
        self.pace = Pace(ceiling)
        self.bound = ""
        self._best_seconds = self._best_rate = 0.0
        self._fast_at = 0
        self._answered = 0
        self._seconds = 0.0
        self._over = 0.0

    def tick(self, now: float, in_flight: int, calls: Calls, *, is_refused: bool, in_queue: int) -> None:
        """Adapt to the calls.

        Args:
            is_refused: some of the refusals were this model's.
            in_queue: attempts that wait in the quota's queue; they need no limit here.
        """
        if is_refused and calls.refused:
            if self.pace.shrink(now, in_flight):
                self.bound = f"429s: they came at {self.pace.found[-1]} at once"
        elif self._is_slow(calls, in_flight):
            if self.pace.shrink(now, in_flight):
                self.bound = f"latency: it grew without more replies at {self.pace.found[-1]} at once"
        elif in_queue:
            self.bound = f"the quota table: {in_queue} wait for their turn"
        else:
            if not self.pace.found:
                self.bound = ""
            self.pace.grow(now, in_flight)

    def _is_slow(self, calls: Calls, in_flight: int) -> bool:
        self._answered += calls.answered
        self._seconds += calls.seconds
        self._over += calls.over_seconds
        if self._answered < FEWEST_CALLS:
            return False
        latency = self._seconds / self._answered
        rate = self._answered / max(self._over, 0.001)
        self._answered = 0
        self._seconds = 0.0
        self._over = 0.0
        is_queue = 0.0 < SLOWER * self._best_seconds < latency and rate < MORE_CALLS * self._best_rate
        is_slow = is_queue and in_flight > MORE_ATTEMPTS * self._fast_at
        if latency < self._best_seconds or not self._best_seconds:
            self._best_seconds = latency
        if latency <= AS_FAST * self._best_seconds:
            self._fast_at = max(self._fast_at, in_flight)
        self._best_rate = max(self._best_rate, rate)
        return is_slow


REFUSED, ANSWERED = "rate_limit", "answered"
TOOL = "tool"


@dataclass(frozen=True, slots=True)
class _CallCounts:
    refused: float
    answered: float
    seconds: float


class ClusterLoad:
    """Reads the load repeatedly."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._before: dict[str, _CallCounts] | None = None
        self._at = 0.0

    async def read(self, now: float, *, starting: int) -> tuple[Hosts, Calls]:
        """Return the load of the machines, and the calls since the last reading.

        Raises:
            StoreError: the store does not answer.
        """
        found = [worker for worker in await read_workers(self._store) if worker.left_seconds > 0]
        counted = {worker.name: _count_calls(worker.figures) for worker in found}
        before, over = self._before, now - self._at
        self._before, self._at = {**(before or {}), **counted}, now
        if before is None:
            return _hosts(found, starting), Calls()
        nothing = _CallCounts(0.0, 0.0, 0.0)
        pairs = [(before.get(name, nothing), after) for name, after in counted.items()]
        calls = Calls(
            refused=int(sum(max(0.0, after.refused - old.refused) for old, after in pairs)),
            answered=int(sum(max(0.0, after.answered - old.answered) for old, after in pairs)),
            seconds=sum(max(0.0, after.seconds - old.seconds) for old, after in pairs),
            over_seconds=max(over, 0.001),
        )
        return _hosts(found, starting), calls


def _count_calls(figures: Mapping[str, Mapping[str, float]]) -> _CallCounts:
    calls = figures.get("model_calls", {})
    seconds = sum(figures.get("model_seconds", {}).values())
    return _CallCounts(calls.get(REFUSED, 0.0), calls.get(ANSWERED, 0.0), seconds)


def _hosts(found: Sequence[WorkerMetrics], starting: int) -> Hosts:
    tools = sum(worker.role == TOOL for worker in found)
    figures = [worker.figures for worker in found]

    def said(name: str, pick: Callable[[Iterable[float]], float]) -> float | None:
        values = [share[""] for each in figures if "" in (share := each.get(name, {}))]
        return min(1.0, max(0.0, pick(values))) if values else None

    return Hosts(
        cpu=said("host_cpu", max),
        memory_free=said("host_memory_free", min),
        cpu_stalled=said("host_cpu_stalled", max),
        memory_stalled=said("host_memory_stalled", max),
        io_stalled=said("host_io_stalled", max),
        starting=starting,
        tool_workers=tools,
    )
