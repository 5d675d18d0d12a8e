"""What a log says of the latest request to stop: which party has stopped, and how long after the request.

Does not: correct the clocks of the writers. The time that a party took by itself is in its event.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from broker.contract import (
    AgentState,
    AgentStateChangedObservation,
    ChangeAgentStateAction,
    DelegateEnded,
    Event,
    InterruptedObservation,
    PartyStopped,
)


@dataclass(frozen=True, slots=True)
class Stopped:
    """A party that has stopped.

    Attributes:
        party: such as `controller`, `the model call`, `action 7`, `delegate d…`.
        event_id: the event that says so.
        after_seconds: from the request to this event; None if an event has no time.
        took_seconds: from the order to the end, as the party itself has measured it; None if it has not.
    """

    party: str
    event_id: int
    after_seconds: float | None
    took_seconds: float | None = None

    def __str__(self) -> str:
        after = "" if self.after_seconds is None else f" {self.after_seconds:.2f} s after the request"
        took = "" if self.took_seconds is None else f", {self.took_seconds:.3f} s after its order"
        return f"[{self.event_id}] {self.party} stopped{after}{took}"


class Stops:
    """The parties that have stopped since the latest request, until the agent runs again. `add` takes another event."""

    def __init__(self) -> None:
        self.parties: list[Stopped] = []
        self._asked_at: datetime | None = None
        self._is_asked = False

    def add(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case ChangeAgentStateAction(agent_state=AgentState.STOPPED) | ChangeAgentStateAction(is_interrupt=True):
                self.parties, self._asked_at, self._is_asked = [], event.timestamp, True
            case ChangeAgentStateAction():
                self._is_asked = False
            case AgentStateChangedObservation(agent_state=AgentState.STOPPED) | InterruptedObservation():
                self._note("controller", event)
            case AgentStateChangedObservation(agent_state=AgentState.RUNNING):
                self.parties, self._is_asked = [], False
            case PartyStopped():
                self._note(event.subject, event, event.seconds)
            case DelegateEnded():
                self._note(f"delegate {event.conversation_id}", event)

    def _note(self, party: str, event: Event, took_seconds: float | None = None) -> None:
        if not self._is_asked:
            return
        after = None
        if self._asked_at is not None and event.timestamp is not None:
            after = max(0.0, (event.timestamp - self._asked_at).total_seconds())
        self.parties.append(Stopped(party, event.id, after, took_seconds))
