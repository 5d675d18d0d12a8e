"""The time of a conversation according to its log: working, or waiting, by reason.

Holds: every second between the first event and the last is counted once; the later event of a pair explains the gap
before it. The time stated in a model's reply is work; the rest of the gap before it is waiting.
Does not: see inside a tool: the time from its action to its observation is work, even if its worker was busy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from broker.contract import (
    AgentState,
    AgentStateChangedObservation,
    Event,
    ModelCallAdmitted,
    ModelCallDeferred,
    ModelCallFailed,
    ModelReply,
    Observation,
)

WORKER = "worker"
"""Waiting for a worker to claim the conversation, or for a reason that the log does not record."""
PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds."""

    working: float
    waiting: Mapping[str, float]


def compute_times(events: Iterable[Event]) -> Times:
    """Return the times of a conversation; reasons with less than one millisecond are left out."""
    working = 0.0
    waiting: dict[str, float] = defaultdict(float)
    before = None
    reason = WORKER
    is_paused = False
    for event in events:
        if event.timestamp is None:
            continue
        gap = max(0.0, (event.timestamp - before).total_seconds()) if before is not None else 0.0
        before = event.timestamp
        work = 0.0 if is_paused else _work_in(event, gap)
        working += work
        waiting[PAUSED if is_paused else reason] += gap - work
        match event:
            case ModelCallFailed(code=code) | ModelCallDeferred(code=code):
                reason = code
            case ModelCallAdmitted() | ModelReply():
                reason = WORKER
            case AgentStateChangedObservation(agent_state=state):
                is_paused = state is AgentState.PAUSED
    return Times(round(working, 3), {name: round(spent, 3) for name, spent in waiting.items() if spent >= 0.001})


def _work_in(event: Event, gap: float) -> float:
    match event:
        case ModelReply():
            return min(gap, max(0.0, event.latency_seconds))
        case AgentStateChangedObservation():
            return 0.0
        case Observation():
            return gap
    return 0.0
