"""Waits of conversations in virtual time: for their next event, while only the cluster can produce it.

Holds: a wait is bounded by the sum of the bounds of the faults that struck. The bounds are those of the design: a
takeover within three seconds, a lost wake-up found a little later.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from broker.contract.agent_state import AgentState
from broker.contract.events import Event
from broker.log.status import Status
from tests.simulation.faults import Fault
from tests.simulation.wire import Written

UNDISTURBED_SECONDS = 1.0
"""The longest wait without a fault: commands and model calls of 0.2 s, and the beat that brings the news."""
RECOVERY_SECONDS = {
    Fault.KILL: 3.0,
    Fault.STOP: 5.0,
    Fault.PAUSE: 1.5,
    Fault.CUT: 1.0,
    Fault.SKEW: 0.5,
    Fault.HOSTS: 1.0,
    Fault.MACHINE: 3.0,
    Fault.SLOW: 6.0,
    Fault.BURIAL: 3.0,
    Fault.RESTART: 4.0,
    Fault.FAIL_OVER: 4.5,
    Fault.LOST_TAIL: 4.0,
    Fault.REFUSAL: 4.0,
    Fault.CLOCK: 3.0,
}
"""What a fault may add to a wait."""


@dataclass(frozen=True)
class Wait:
    """How long a conversation had to wait for the event after `event_id`."""

    seconds: float
    conversation_id: str
    event_id: int


def waits(written: Sequence[Written], logs: Mapping[str, Sequence[Event]]) -> Iterator[Wait]:
    """Yield the waits between the events of logs, while their conversations were neither settled nor rate limited."""
    for conversation_id, events in logs.items():
        status, before = Status(), 0.0
        for append in written:
            if append.conversation_id != conversation_id:
                continue
            if append.first_id > 1 and not (status.is_settled or status.state is AgentState.RATE_LIMITED):
                yield Wait(append.at - before, conversation_id, append.first_id - 1)
            for event in events[append.first_id - 1 : append.last_id]:
                status = status.apply(event)
            before = append.at


def longest_allowed(struck: Sequence[Fault]) -> float:
    """Return how long the longest wait may be after these faults."""
    return UNDISTURBED_SECONDS + sum(RECOVERY_SECONDS[fault] for fault in struck)
