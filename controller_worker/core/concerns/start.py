"""Scheduled start: a conversation that waits for its time, and one that expires if it has not started by some time.

The store measures the time, so no worker's clock counts: the loop asks the store, and an event records that the time
has come. A user who resumes the conversation starts it at once.

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
    ConversationBegun,
    ConversationCreated,
    MessageAction,
)
from controller_worker.core.announcement import announce
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.effects import AwaitStart, Effect, Rest
from controller_worker.core.requests import asks_to_run, is_message_of_person

if TYPE_CHECKING:
    from controller_worker.core.state import State

WAITING, OVER, BEGUN = "waiting", "over", "begun"


@dataclass(frozen=True)
class Start:
    """The progress of a conversation with a start time or an expiry.

    Attributes:
        standing: `waiting`, `over` (stopped or expired before its start), `begun`; empty: it started at once.
        has_time: it has an earliest start time.
    """

    standing: str = ""
    has_time: bool = False


def _after_creation(start: Start, created: ConversationCreated, state: State) -> Start:
    if created.id > 1 or not created.is_planned:
        return start
    return Start(WAITING, created.not_before is not None)


def _after_begun(start: Start, event: ConversationBegun, state: State) -> Start:
    return evolve(start, standing=BEGUN) if start.standing == WAITING else start


def _after_change(start: Start, change: AgentStateChangedObservation, state: State) -> Start:
    is_over = start.standing == WAITING and change.agent_state in TERMINAL_STATES
    return evolve(start, standing=OVER) if is_over else start


def _after_request(start: Start, request: ChangeAgentStateAction, state: State) -> Start:
    return evolve(start, standing=BEGUN) if waits(start) and asks_to_run(request) else start


def _after_message(start: Start, message: MessageAction, state: State) -> Start:
    """Start an expired or stopped conversation at a user's message. While it waits, a message belongs to its task."""
    return evolve(start, standing=BEGUN) if start.standing == OVER and is_message_of_person(message) else start


def waits(start: Start) -> bool:
    """Return whether the conversation still waits for its start."""
    return start.standing in (WAITING, OVER)


def await_start(state: State, now: datetime) -> Effect | None:
    """Do nothing before the start time, except for a user's requests."""
    if not waits(state.start):
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
        ConversationBegun: _after_begun,
        AgentStateChangedObservation: _after_change,
        ChangeAgentStateAction: _after_request,
        MessageAction: _after_message,
    },
)
