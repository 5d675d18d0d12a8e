"""The waits in the log of a conversation: a fold, like a summary.

`find_stop` reads, for the latest request to stop, which parties have stopped and how long after the request.

Holds: pure; the same events give the same history.
Does not: correct the clocks of the writers. The time that a party measured itself is in its event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from broker.contract import (
    Action,
    AgentDelegateAction,
    AgentState,
    AgentStateChangedObservation,
    ChangeAgentStateAction,
    ConfirmationStatus,
    ConversationCreated,
    ConversationStarted,
    DelegateEnded,
    Event,
    EventSource,
    InterruptedObservation,
    MessageAction,
    ModelCallAdmitted,
    ModelCallDeferred,
    ModelCallFailed,
    ModelReply,
    Observation,
    OperatorActed,
    PartyStopped,
)
from broker.log import Status


@dataclass(frozen=True, slots=True)
class Stopped:
    """A party that has stopped.

    Attributes:
        party: such as `controller`, `the model call`, `action 7`, `delegate d…`.
        event_id: the event that reports it.
        after_seconds: from the request to this event; None if an event has no time.
        took_seconds: from the order to the end, as measured by the party itself; None if not measured.
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
    """The parties that have stopped since the latest request, until the agent runs again.

    `add` takes the next event.
    """

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


LAST_LINES = 5
TEXT_CHARS = 300


@dataclass(slots=True)
class History:
    """The parts of a log that explain waits.

    Attributes:
        created: its first event; None if the log is empty.
        changed: the latest change of the agent's state.
        pending: actions for tool workers without an observation, in order, except those that await confirmation.
        delegates: those that a step waits for, by their delegating action.
        failure: the latest failed call, until one succeeds.
        deferral: the reason why the next call has to wait, until it may be made.
        message: the agent's latest message, or empty.
        unread: the first message or request that the agent has not noticed.
        operator: the latest action of an operator through the server.
        lines: the latest events, as readable lines.
        stops: the parties that have stopped since the latest request to stop.
        updated: when the log was last written.
    """

    status: Status = field(default_factory=Status)
    created: ConversationCreated | None = None
    changed: AgentStateChangedObservation | None = None
    pending: dict[int, Action] = field(default_factory=dict)
    asked: dict[int, Action] = field(default_factory=dict)
    delegates: dict[int, AgentDelegateAction] = field(default_factory=dict)
    failure: ModelCallFailed | None = None
    deferral: ModelCallDeferred | None = None
    message: str = ""
    unread: Event | None = None
    operator: OperatorActed | None = None
    is_started: bool = False
    updated: datetime | None = None
    lines: list[str] = field(default_factory=list)
    stops: Stops = field(default_factory=Stops)

    def add(self, event: Event) -> None:
        """Add the next event."""
        self.status = self.status.apply(event)
        self.stops.add(event)
        self.updated = event.timestamp or self.updated
        if self.status.is_unanswered:
            is_request = isinstance(event, MessageAction | ChangeAgentStateAction)
            self.unread = self.unread or (event if is_request else None)
        else:
            self.unread = None
        self.lines = [*self.lines, f"[{event.id}] {event.kind}: {event.sentence}"[:TEXT_CHARS]][-LAST_LINES:]
        match event:
            case ConversationCreated():
                self.created = self.created or event
            case ConversationStarted():
                self.is_started = True
            case AgentStateChangedObservation():
                self.changed = event
                if event.agent_state not in (AgentState.RUNNING, AgentState.RATE_LIMITED):
                    self.deferral = None
            case DelegateEnded():
                self.delegates.pop(event.delegate_id, None)
            case Observation():
                self._answer(event)
            case ModelReply():
                self.failure = self.deferral = None
            case ModelCallFailed():
                self.failure = event
                self.deferral = None
            case ModelCallDeferred():
                self.deferral = event
            case ModelCallAdmitted():
                self.deferral = None
            case OperatorActed():
                self.operator = event
            case AgentDelegateAction():
                self.delegates[event.id] = event
            case MessageAction(source=EventSource.AGENT):
                self.message = event.content
            case Action():
                self._act(event)

    def _answer(self, event: Observation) -> None:
        if isinstance(event, InterruptedObservation):
            self.deferral = self.failure = None
        if event.cause:
            self.pending.pop(event.cause, None)
            self.delegates.pop(event.cause, None)

    def _act(self, event: Action) -> None:
        state = getattr(event, "confirmation_state", ConfirmationStatus.CONFIRMED)
        if state is ConfirmationStatus.AWAITING_CONFIRMATION:
            self.asked[event.id] = event
        elif event.runnable and state is ConfirmationStatus.CONFIRMED:
            self.pending[event.id] = event


def fold_history(events: Iterable[Event]) -> History:
    """Return the history of a log."""
    found = History()
    for event in events:
        found.add(event)
    return found
