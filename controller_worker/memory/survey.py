"""The survey of a workspace before the first message is recalled, as part of the core.

The controller cannot read a workspace; a tool worker can. So the question is an action of the environment and its
answer an observation, neither of which the model sees: the log stays the only source, and a replay needs no workspace.

Holds: a message is recalled whatever becomes of the question; a workspace that cannot be asked is one that says
nothing; nobody waits for the answer when work is to stop.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator

from broker.actions import SurveyAction
from broker.agent_state import AgentState
from broker.events import Action, Observation
from broker.observations import OutcomeUnknownObservation, SurveyObservation
from broker.skills import FILE_MARK, skills_of
from broker.specs import Skill
from controller_worker.effects import Append, AwaitTools
from controller_worker.state import State, Survey, replace, with_pending

MAX_ATTEMPTS = 3


def wants_survey(state: State) -> bool:
    """Say whether the workspace is to be asked before the first message is recalled."""
    return (
        state.message is not None
        and state.message.is_first
        and (state.workspace.path is not None or state.opening.is_open)
        and state.agent.enable_workspace_skills
        and not state.survey.is_over
        and state.requested in (None, AgentState.RUNNING)
    )


def survey(state: State) -> Append | AwaitTools:
    """Return the question, or the wait for its answer."""
    asked = state.survey.action_id
    return AwaitTools((asked,)) if asked else Append((SurveyAction(),))


def after_start(state: State, action: Action) -> State | None:
    """Return the state after the survey was begun; None if the action is not the one that is wanted."""
    if not (isinstance(action, SurveyAction) and wants_survey(state)):
        return None
    begun = Survey(action_id=action.id, attempts=state.survey.attempts + 1)
    return replace(with_pending(state, action.id), survey=begun)


def after_answer(state: State, answer: Observation) -> State:
    """Return the state after the answer; when nobody knows what became of the question, it is asked again."""
    asked = state.survey
    if isinstance(answer, OutcomeUnknownObservation) and asked.attempts < MAX_ATTEMPTS:
        return replace(state, survey=Survey(attempts=asked.attempts))
    is_answer = isinstance(answer, SurveyObservation) and answer.is_complete
    return replace(state, survey=Survey(0, asked.attempts, answer.id if is_answer else 0, is_over=True))


def skills_from(answer: Observation) -> tuple[Skill, ...]:
    """Return the skills of an answer; what is damaged in it is left out."""
    return skills_of(_files(answer.content)) if isinstance(answer, SurveyObservation) else ()


def _files(output: str) -> Iterator[tuple[str, str]]:
    for line in output.splitlines():
        if not line.startswith(FILE_MARK):
            continue
        parts = line.removeprefix(FILE_MARK).split()
        try:
            path, content = (base64.b64decode(part, validate=True).decode(errors="replace") for part in parts)
        except (ValueError, binascii.Error):
            continue
        yield path, content
