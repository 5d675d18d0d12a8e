"""The load reported by workers, as input for the pace: machine load, and model calls since the last reading.

Holds: a new worker counts from 0; one that existed at the first reading counts from there. Forged figures can only make
an evaluation slower, never faster than its ceiling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from broker.store import Store
from deckhands.evaluation.attempts.pace import Calls, Hosts
from deckhands.operations import WorkerMetrics, read_workers

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
