"""Opening a workspace from a repository or an archive.

A tool worker opens it, so the request is an action of the environment and the result an observation; both are hidden
from the model. It precedes everything that needs the workspace, such as the survey and the first step.

Holds: no step is taken in a workspace that is not open. A failed opening ends the work in an error with the cause, and
is retried when a user resumes the conversation. A stop does not wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract import (
    Action,
    AgentState,
    ChangeAgentStateAction,
    Event,
    EventSource,
    MessageAction,
    Observation,
    OpenWorkspaceAction,
    OutcomeUnknownObservation,
    WorkspaceFailedObservation,
    WorkspaceOpenedObservation,
)
from controller_worker.core.concern import Concern
from controller_worker.core.effects import Append, AwaitTools, Effect
from controller_worker.core.pending import is_run_request

if TYPE_CHECKING:
    from controller_worker.core.state import State

MAX_ATTEMPTS = 3
FAILED_CODE = "workspace_not_opened"


@dataclass(frozen=True)
class Opening:
    """The progress of filling the workspace from its source.

    Attributes:
        action_id: the opening in flight; 0 for none.
        attempts: number of attempts since a user last resumed the conversation.
    """

    action_id: int = 0
    attempts: int = 0
    is_open: bool = False
    has_failed: bool = False


def needs_opening(state: State) -> bool:
    """Return whether the workspace must be opened now."""
    return (
        state.setup.workspace.source is not None
        and state.inbox.last_message_id != 0
        and not (state.opening.is_open or state.opening.has_failed)
        and (state.lifecycle.requested or state.lifecycle.agent_state) is AgentState.RUNNING
    )


def is_opening(state: State, action: Action) -> bool:
    """Return whether this action is the opening in flight."""
    return isinstance(action, OpenWorkspaceAction) and needs_opening(state)


def open_workspace(state: State, now: datetime) -> Effect | None:
    """Ask a tool worker to open the workspace, then wait for its answer."""
    if not needs_opening(state):
        return None
    asked = state.opening.action_id
    return AwaitTools((asked,)) if asked else Append((OpenWorkspaceAction(),))


def find_failure(state: State, event: Observation) -> tuple[str, str] | None:
    """Return reason and code of a failed opening; None for any other observation.

    An opening with an unknown outcome is retried. One that a user stopped has not failed.
    """
    if not 0 != state.opening.action_id == event.cause or _is_settled_well(state.opening, event):
        return None
    if event.source is EventSource.AGENT:
        return None
    return event.content, event.code if isinstance(event, WorkspaceFailedObservation) else FAILED_CODE


def _after_action(opening: Opening, action: OpenWorkspaceAction, state: State) -> Opening:
    return Opening(action.id, opening.attempts + 1) if is_opening(state, action) else opening


def _after_observation(opening: Opening, answer: Observation, state: State) -> Opening:
    if not 0 != opening.action_id == answer.cause:
        return opening
    if isinstance(answer, WorkspaceOpenedObservation):
        return Opening(is_open=True)
    return Opening(attempts=opening.attempts) if _is_settled_well(opening, answer) else Opening(has_failed=True)


def _after_request(opening: Opening, event: Event, state: State) -> Opening:
    """Retry a failed opening when a user resumes the conversation."""
    return Opening() if opening.has_failed and is_run_request(event) else opening


def _is_settled_well(opening: Opening, answer: Observation) -> bool:
    is_unknown = isinstance(answer, OutcomeUnknownObservation) and opening.attempts < MAX_ATTEMPTS
    return is_unknown or isinstance(answer, WorkspaceOpenedObservation)


OPENING = Concern(
    "opening",
    {
        OpenWorkspaceAction: _after_action,
        Observation: _after_observation,
        MessageAction: _after_request,
        ChangeAgentStateAction: _after_request,
    },
)
