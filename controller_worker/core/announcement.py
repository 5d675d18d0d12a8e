"""Announce a state and settle unfinished work (OpenHands 1.10).

Holds: after a stop or an error, every action and every delegate has an answer. Everything is one append.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from broker.contract import (
    Action,
    AgentState,
    AgentStateChangedObservation,
    ErrorObservation,
    Event,
    EventSource,
    Observation,
    with_fields,
)
from controller_worker.core.effects import Append
from controller_worker.core.pending import PendingAction

if TYPE_CHECKING:
    from controller_worker.core.concerns.delegation import Delegate, ManagingAction
    from controller_worker.core.state import State

ObservationT = TypeVar("ObservationT", bound=Observation)

EVERYTHING = 0
"""In the list of actions to cancel: everything that runs in the workspace."""

NOT_EXECUTED = {
    AgentState.STOPPED: (
        "Stop button pressed. The action has not been executed.",
        "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_STOPPED",
    ),
    AgentState.ERROR: (
        "The action has not been executed due to a runtime error.",
        "AGENT_ERROR$ERROR_ACTION_NOT_EXECUTED_ERROR",
    ),
}


def announce(
    state: State, wanted: AgentState, reason: str = "", *, code: str = "", after: tuple[Event, ...] = ()
) -> Append:
    """Return the events that announce a state. A stop or an error first settles the actions that have not run.

    Args:
        reason: the reason for an error.
        code: the class of the error.
        after: events to append before the announcement.
    """
    events: list[Event] = list(after)
    answers: list[tuple[int, int]] = []
    cancels: tuple[int, ...] = ()
    if wanted in NOT_EXECUTED:
        text, error_id = NOT_EXECUTED[wanted]
        unanswered: list[PendingAction | Delegate] = [*state.tools.pending]
        unanswered += [delegate for delegate in state.delegation.delegates if not delegate.is_answered]
        for action in unanswered:
            answers.append((len(events), action.id))
            events.append(make_not_executed(action, text, error_id))
        cancels = tuple(action.id for action in state.tools.pending)
        # A stop makes earlier background jobs useless; after an error, a user may continue.
        cancels += (EVERYTHING,) if wanted is AgentState.STOPPED else ()
    if wanted is not AgentState.ERROR:
        reason = ""
        code = ""
    events.append(AgentStateChangedObservation(agent_state=wanted, reason=reason, code=code))
    return Append(tuple(events), tuple(answers), cancels)


def make_not_executed(action: PendingAction | Delegate | ManagingAction, text: str, error_id: str) -> ErrorObservation:
    """Return the observation of an action that will not run, or not to its end."""
    return to_answer(action, ErrorObservation(content=text, error_id=error_id))


def to_answer(action: Action | PendingAction | Delegate | ManagingAction, observation: ObservationT) -> ObservationT:
    """Return the observation as the answer to an action that the controller settles itself."""
    return with_fields(
        observation, source=EventSource.AGENT, cause=action.id, tool_call_metadata=action.tool_call_metadata
    )


def end_in_error(state: State, reason: str, *, code: str = "") -> Append:
    """Return the events that end the work with an error. Pending actions are settled as not executed."""
    return announce(state, AgentState.ERROR, reason, code=code)
