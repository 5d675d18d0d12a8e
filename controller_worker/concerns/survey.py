"""The survey of a workspace before the first message is recalled, as part of the core.

The controller cannot read a workspace; a tool worker can. So the question is an action of the environment and its
answer an observation, neither of which the model sees: the log stays the only source, and a replay needs no workspace.

Holds: a message is recalled whatever becomes of the question; a workspace that cannot be asked is one that says
nothing; nobody waits for the answer when work is to stop.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract.events import Action, Observation
from broker.contract.observations import OutcomeUnknownObservation, SurveyObservation
from broker.contract.workspace_events import SurveyAction
from broker.specs.agent_state import AgentState
from broker.specs.skills import FILE_MARK, NO_SKILLS, SkillFiles, SkillReader, skills_of
from controller_worker.core.concern import Concern
from controller_worker.core.effects import Append, AwaitTools, Effect

if TYPE_CHECKING:
    from controller_worker.core.state import State

MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class Survey:
    """Whether the workspace was asked what it tells agents.

    Attributes:
        action_id: the question under way, 0 for none.
        attempts: how often it was asked.
        answer_id: the event that answers it, 0 for none.
    """

    action_id: int = 0
    attempts: int = 0
    answer_id: int = 0
    is_over: bool = False


def wants_survey(state: State) -> bool:
    """Say whether the workspace is to be asked before the first message is recalled."""
    message, setup = state.inbox.message, state.setup
    return (
        message is not None
        and message.is_first
        and (setup.workspace.path is not None or state.opening.is_open)
        and setup.agent.enable_workspace_skills
        and not state.survey.is_over
        and state.lifecycle.requested in (None, AgentState.RUNNING)
    )


def is_survey(state: State, action: Action) -> bool:
    """Say whether this action is the question that is wanted."""
    return isinstance(action, SurveyAction) and wants_survey(state)


def survey_workspace(state: State, now: datetime) -> Effect | None:
    """Ask the workspace, then wait for its answer."""
    if not wants_survey(state):
        return None
    asked = state.survey.action_id
    return AwaitTools((asked,)) if asked else Append((SurveyAction(),))


def _after_action(survey: Survey, action: SurveyAction, state: State) -> Survey:
    return Survey(action.id, survey.attempts + 1) if is_survey(state, action) else survey


def _after_observation(survey: Survey, answer: Observation, state: State) -> Survey:
    """Note the answer; a question whose outcome is unknown is asked again."""
    if not 0 != survey.action_id == answer.cause:
        return survey
    if isinstance(answer, OutcomeUnknownObservation) and survey.attempts < MAX_ATTEMPTS:
        return Survey(attempts=survey.attempts)
    is_answer = isinstance(answer, SurveyObservation) and answer.is_complete
    return Survey(0, survey.attempts, answer.id if is_answer else 0, is_over=True)


SURVEY = Concern("survey", {SurveyAction: _after_action, Observation: _after_observation})


def skills_from(answer: Observation) -> SkillFiles:
    """Return the skills of an answer; what is damaged in it is left out."""
    return skills_of(_files(answer.content)) if isinstance(answer, SurveyObservation) else NO_SKILLS


async def skills_read(answer: Observation) -> SkillFiles:
    """See `skills_from`; after each file it is the turn of whatever else the worker has to do."""
    reader = SkillReader()
    for path, text in _files(answer.content) if isinstance(answer, SurveyObservation) else ():
        reader.add(path, text)
        await asyncio.sleep(0)
    return reader.read()


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
