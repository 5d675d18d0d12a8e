"""Actions that wait for an observation, and events that ask the agent to act."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from broker.contract import (
    AgentState,
    ChangeAgentStateAction,
    Event,
    EventSource,
    MessageAction,
    Observation,
    ToolCallMetadata,
)
from controller_worker.core.stuck_detector import Trace

if TYPE_CHECKING:
    from controller_worker.core.state import State


@dataclass(frozen=True, slots=True)
class PendingAction:
    """An action in the log that has no observation yet.

    Attributes:
        trace: its trace for loop detection; None if detection ignores the action.
        is_awaiting: it waits for a user's confirmation.
    """

    id: int
    tool_call_metadata: ToolCallMetadata | None = None
    trace: Trace | None = None
    is_awaiting: bool = False


@dataclass(frozen=True)
class Tools:
    """The actions without an observation, in the order of the log.

    Attributes:
        questions: calls that were answered with questions for the user, and the events with the questions.
    """

    pending: tuple[PendingAction, ...] = ()
    questions: tuple[tuple[int, int], ...] = ()


def find_settled(state: State, observation: Observation) -> PendingAction | None:
    """Return the pending action that an observation answers, or None."""
    cause = observation.cause
    for action in state.tools.pending:
        if action.id == cause:
            return action
    return None


def find_runnable(state: State) -> tuple[int, ...]:
    """Return the pending actions that may run, in order: those before the first that waits for a confirmation."""
    return tuple(action.id for action in takewhile(lambda pending: not pending.is_awaiting, state.tools.pending))


def is_user_message(event: Event) -> bool:
    """Return whether an event is a user's message."""
    return isinstance(event, MessageAction) and event.source is EventSource.USER


def is_run_request(event: Event) -> bool:
    """Return whether the event asks the agent to work: a user's message, or a request for `running`."""
    is_resume = isinstance(event, ChangeAgentStateAction) and event.agent_state is AgentState.RUNNING
    return is_resume or is_user_message(event)
