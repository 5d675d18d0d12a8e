"""The status of a conversation in OpenHands' words, folded from its log.

Holds: the same events give the same status at every server. A request changes the status at once, as in OpenHands: a
pause counts before the agent has announced it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from broker.contract import (
    STUCK_CODE,
    AgentSpec,
    AgentState,
    AgentStateChangedObservation,
    ChangeAgentStateAction,
    ConfirmationPolicy,
    ConversationChanged,
    ConversationCreated,
    Event,
    EventSource,
    MessageAction,
)
from broker.log import Status
from deckhands.client import is_hold

IDLE, RUNNING, PAUSED, WAITING, FINISHED, ERROR, STUCK = (
    "idle",
    "running",
    "paused",
    "waiting_for_confirmation",
    "finished",
    "error",
    "stuck",
)
STATES_OF = {
    IDLE: (AgentState.LOADING, AgentState.PAUSED),
    RUNNING: (
        AgentState.RUNNING,
        AgentState.RATE_LIMITED,
        AgentState.USER_CONFIRMED,
        AgentState.USER_REJECTED,
        AgentState.LOADING,
    ),
    PAUSED: (AgentState.PAUSED, AgentState.STOPPED),
    WAITING: (AgentState.AWAITING_USER_CONFIRMATION,),
    FINISHED: (AgentState.FINISHED, AgentState.REJECTED, AgentState.AWAITING_USER_INPUT),
    ERROR: (AgentState.ERROR,),
    STUCK: (AgentState.ERROR,),
}
"""The states that may have a status. Both of OpenHands' ends of a turn, a finish and a message, are `finished`."""
_STATUS_OF = {
    state: name for name in (STUCK, RUNNING, IDLE, PAUSED, WAITING, FINISHED, ERROR) for state in STATES_OF[name]
}


class RunState:
    """Whether a conversation runs, and the needs of a run, after the added events.

    Attributes:
        status: the status of the agent according to the log.
        title: the name for listings.
        has_message: the user has sent a message.
        is_held: the last request holds the conversation.
    """

    def __init__(self) -> None:
        self.status = Status()
        self.agent = AgentSpec()
        self.title = ""
        self.has_message = self.is_held = False
        self._is_pause = False
        self._code = ""

    @classmethod
    def of_row(cls, state: str, events: Iterable[Event]) -> Self:
        """Return the status for a row of a listing, including the effect of its latest events."""
        found = cls()
        found.status = Status(AgentState(state))
        for event in events:
            found.add(event)
        return found

    def add(self, event: Event) -> None:
        """Add the next event."""
        self.status = self.status.apply(event)
        match event:
            case ConversationCreated():
                self.agent = event.agent
                self.title = event.title
            case ConversationChanged():
                self._change(event)
            case MessageAction(source=EventSource.USER):
                self.has_message = True
                self.is_held = self._is_pause = False
            case ChangeAgentStateAction():
                self.is_held = is_hold(event)
                self._is_pause = event.agent_state is AgentState.PAUSED
            case AgentStateChangedObservation():
                self._code = event.code

    def _change(self, change: ConversationChanged) -> None:
        self.agent = change.agent or self.agent
        policy = change.confirmation or self.agent.confirmation
        if change.analyzer is not None:
            policy = policy.model_copy(update={"analyzer": change.analyzer})
        self.agent = self.agent.model_copy(update={"confirmation": policy})
        self.title = change.title or self.title

    @property
    def policy(self) -> ConfirmationPolicy:
        """When the user must confirm an action."""
        return self.agent.confirmation

    @property
    def execution_status(self) -> str:
        """The status, in OpenHands' words."""
        found = self.status
        is_called = found.has_unread_message and not self._is_pause
        state = found.requested or (AgentState.RUNNING if is_called else found.state)
        if state is AgentState.PAUSED and self.is_held:
            return IDLE
        if state is AgentState.ERROR and self._code == STUCK_CODE:
            return STUCK
        return _STATUS_OF[state]
