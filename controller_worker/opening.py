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
from controller_worker.state import Opening, State, replace, with_pending

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


def after_start(state: State, action: Action) -> State | None:
    """Return the state after the opening was begun; None if the action is not the one that is wanted."""
    if not (isinstance(action, OpenWorkspaceAction) and wants_opening(state)):
        return None
    begun = Opening(action_id=action.id, attempts=state.opening.attempts + 1)
    return replace(with_pending(state, action.id), opening=begun)


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
