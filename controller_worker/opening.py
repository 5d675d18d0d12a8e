"""Opening a workspace that begins with a repository or an archive, as part of the core.

A tool worker does it, so the wish is an action of the environment and what came of it an observation; the model sees
neither. It comes before everything that needs the workspace, the survey and the first step among them.

Holds: no step is taken in a workspace that is not open; what cannot be opened ends in an error that says why, and is
tried again when a person goes on with the conversation; nobody waits for it when work is to stop.
"""

from __future__ import annotations

from broker.agent_state import AgentState
from broker.events import Action, EventSource, Observation
from broker.observations import OutcomeUnknownObservation
from broker.workspace_events import OpenWorkspaceAction, WorkspaceFailedObservation, WorkspaceOpenedObservation
from controller_worker.effects import Append, AwaitTools
from controller_worker.state import Opening, PendingAction, State, replace

MAX_ATTEMPTS = 3
FAILED_CODE = "workspace_not_opened"


def wants_opening(state: State) -> bool:
    """Say whether the workspace has to be opened now."""
    return (
        state.workspace.source is not None
        and state.last_message_id != 0
        and not (state.opening.is_open or state.opening.has_failed)
        and (state.requested or state.agent_state) is AgentState.RUNNING
    )


def opening(state: State) -> Append | AwaitTools:
    """Return the wish, or the wait for what comes of it."""
    asked = state.opening.action_id
    return AwaitTools((asked,)) if asked else Append((OpenWorkspaceAction(),))


def is_opening(state: State, action: Action) -> bool:
    """Say whether an action is the opening that is wanted."""
    return isinstance(action, OpenWorkspaceAction) and wants_opening(state)


def after_start(state: State, action: Action) -> State:
    """Return the state after the opening was begun."""
    begun = Opening(action_id=action.id, attempts=state.opening.attempts + 1)
    return replace(state, pending=(*state.pending, PendingAction(action.id)), opening=begun)


def after_answer(state: State, answer: Observation) -> State:
    """Return the state after the opening; when nobody knows what became of it, it is begun again."""
    attempts = state.opening.attempts
    if isinstance(answer, WorkspaceOpenedObservation):
        return replace(state, opening=Opening(is_open=True))
    if isinstance(answer, OutcomeUnknownObservation) and attempts < MAX_ATTEMPTS:
        return replace(state, opening=Opening(attempts=attempts))
    state = replace(state, opening=Opening(has_failed=True))
    if answer.source is EventSource.AGENT:
        return state  # it was stopped by a person, which is no failure
    code = answer.code if isinstance(answer, WorkspaceFailedObservation) else FAILED_CODE
    return replace(state, ending=AgentState.ERROR, last_error=answer.content, error_code=code)


def begun_anew(state: State) -> State:
    """Return the state when a person goes on: what could not be opened may be opened now."""
    return replace(state, opening=Opening()) if state.opening.has_failed else state
