"""Scheduled start: a conversation that waits for its start time, or expires if it has not started in time.

The store measures the time, so a worker's clock does not matter: the loop asks the store, and an event records that the
time has come. A user who resumes the conversation starts it at once.

Holds: a waiting conversation only reacts to a stop or a pause. A conversation that expires before its start ends in an
error with its own code; only a user can start it then.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract import (
    TERMINAL_STATES,
    AgentState,
    AgentStateChangedObservation,
    ChangeAgentStateAction,
    ConversationCreated,
    ConversationStarted,
    MessageAction,
)
from controller_worker.core.announcement import announce
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.effects import AwaitStart, Effect, Rest
from controller_worker.core.pending import is_run_request, is_user_message

if TYPE_CHECKING:
    from controller_worker.core.state import State

WAITING, OVER, BEGUN = "waiting", "over", "begun"


@dataclass(frozen=True)
class ScheduledStart:
    """The progress of a conversation with a start time or an expiry.

    Attributes:
        standing: `waiting`, `over` (stopped or expired before its start), `begun`; empty if it started at once.
        has_time: it has an earliest start time.
    """

    standing: str = ""
    has_time: bool = False


def _after_creation(start: ScheduledStart, created: ConversationCreated, state: State) -> ScheduledStart:
    if created.id > 1 or not created.has_start_window:
        return start
    return ScheduledStart(WAITING, created.not_before is not None)


def _after_begun(start: ScheduledStart, event: ConversationStarted, state: State) -> ScheduledStart:
    return evolve(start, standing=BEGUN) if start.standing == WAITING else start


def _after_change(start: ScheduledStart, change: AgentStateChangedObservation, state: State) -> ScheduledStart:
    is_over = start.standing == WAITING and change.agent_state in TERMINAL_STATES
    return evolve(start, standing=OVER) if is_over else start


def _after_request(start: ScheduledStart, request: ChangeAgentStateAction, state: State) -> ScheduledStart:
    return evolve(start, standing=BEGUN) if is_waiting(start) and is_run_request(request) else start


def _after_message(start: ScheduledStart, message: MessageAction, state: State) -> ScheduledStart:
    """Start an expired or stopped conversation at a user's message. While it waits, a message belongs to its task."""
    return evolve(start, standing=BEGUN) if start.standing == OVER and is_user_message(message) else start


def is_waiting(start: ScheduledStart) -> bool:
    """Return whether the conversation still waits for its start."""
    return start.standing in (WAITING, OVER)


def await_start(state: State, now: datetime) -> Effect | None:
    """Do nothing before the start time, except for a user's requests."""
    if not is_waiting(state.start):
        return None
    requested = state.lifecycle.requested
    shown = state.lifecycle.agent_state
    if requested in (AgentState.STOPPED, AgentState.PAUSED):
        return announce(state, requested)
    is_held = state.start.standing == OVER or shown is AgentState.PAUSED
    return Rest() if is_held else AwaitStart()


START = Concern(
    "start",
    {
        ConversationCreated: _after_creation,
        ConversationStarted: _after_begun,
        AgentStateChangedObservation: _after_change,
        ChangeAgentStateAction: _after_request,
        MessageAction: _after_message,
    },
)
