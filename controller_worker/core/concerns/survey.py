"""The survey of a workspace before the first recall, and the setup scripts of its repository.

Only a tool worker can read a workspace. So the survey is an action of the environment and its answer an observation,
both hidden from the model. The log stays the only source, and a replay needs no workspace.

Holds: a message is recalled whatever the outcome of the survey. A workspace that cannot be read counts as empty. A stop
does not wait for the answer. A script is started once, and its failure does not stop the work.
Differs: the output of a failed setup script is shown to the model. No hook is written into a directory named by a user,
where it would also run outside the sandbox.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract import (
    FILE_MARK,
    HOOK_SCRIPT,
    NO_SKILLS,
    SETUP_SCRIPT,
    Action,
    AgentState,
    CmdRunAction,
    EventSource,
    Observation,
    OutcomeUnknownObservation,
    SkillFiles,
    SkillReader,
    SurveyAction,
    SurveyObservation,
)
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.effects import Append, AwaitTools, Effect

if TYPE_CHECKING:
    from controller_worker.core.state import State

MAX_ATTEMPTS = 3
SCRIPT_LIMIT_SECONDS = 600.0
"""As in the original (10.1)."""

INSTALLED = "Installed by Deckhands"
HOOK = f"""#!/bin/bash
# {INSTALLED}: runs the hook that was here before, then the one of the repository.
if [ -x .git/hooks/pre-commit.local ]; then .git/hooks/pre-commit.local "$@" || exit; fi
if [ -f {HOOK_SCRIPT} ]; then bash {HOOK_SCRIPT} "$@"; fi
"""
INSTALL_HOOK = (
    "hook=.git/hooks/pre-commit; if [ -d .git ] && [ ! -L .git ] && [ ! -L .git/hooks ] && [ ! -L $hook ]; then "
    f"mkdir -p .git/hooks; if [ -e $hook ] && ! grep -q '{INSTALLED}' $hook; then mv $hook $hook.local; fi; "
    f"printf %s {shlex.quote(HOOK)} > $hook && chmod +x $hook; fi"
)


@dataclass(frozen=True)
class Survey:
    """The progress of the survey.

    Attributes:
        action_id: the survey, or later the script, in flight; 0 for none.
        attempts: number of attempts.
        answer_id: the event with the answer; 0 for none.
        scripts: scripts still to run, or in flight.
    """

    action_id: int = 0
    attempts: int = 0
    answer_id: int = 0
    is_over: bool = False
    scripts: tuple[str, ...] = ()


def needs_survey(state: State) -> bool:
    """Return whether to survey the workspace before the first recall."""
    setup = state.setup
    return (
        _is_first_message(state)
        and (setup.workspace.path is not None or state.opening.is_open)
        and setup.agent.enable_workspace_skills
        and not state.survey.is_over
    )


def needs_script(state: State) -> bool:
    """Return whether a script of the repository must run, or end, before the first recall."""
    return _is_first_message(state) and bool(state.survey.scripts)


def _is_first_message(state: State) -> bool:
    message = state.inbox.message
    return message is not None and message.is_first and state.lifecycle.requested in (None, AgentState.RUNNING)


def is_survey(state: State, action: Action) -> bool:
    """Return whether this action is the survey in flight."""
    return isinstance(action, SurveyAction) and needs_survey(state)


def is_script(state: State, action: Action) -> bool:
    """Return whether this action is the script in flight."""
    return isinstance(action, CmdRunAction) and action.source is EventSource.ENVIRONMENT and needs_script(state)


def survey_workspace(state: State, now: datetime) -> Effect | None:
    """Survey the workspace and wait for the answer, then do the same with each script of the repository."""
    is_surveying = needs_survey(state)
    if not (is_surveying or needs_script(state)):
        return None
    if state.survey.action_id:
        return AwaitTools((state.survey.action_id,))
    return Append((SurveyAction() if is_surveying else _make_script_action(state.survey.scripts[0]),))


def _make_script_action(name: str) -> CmdRunAction:
    is_hook = name == HOOK_SCRIPT
    return CmdRunAction(
        command=INSTALL_HOOK if is_hook else f"source {name}",
        source=EventSource.ENVIRONMENT,
        blocking=True,
        hidden=True,
        is_static=is_hook,  # the variables set by the setup script are for the agent's shell
        timeout=SCRIPT_LIMIT_SECONDS,
    )


def _find_due_scripts(state: State, answer: Observation) -> tuple[str, ...]:
    """Return the scripts to run; none for a delegate, because its parent's workspace is set up."""
    setup = state.setup
    if not isinstance(answer, SurveyObservation) or setup.delegate_level or not setup.agent.enable_cmd:
        return ()
    may_run = (SETUP_SCRIPT, HOOK_SCRIPT) if setup.workspace.path is None else (SETUP_SCRIPT,)
    return tuple(name for name in may_run if name in answer.scripts)


def _after_action(survey: Survey, action: SurveyAction, state: State) -> Survey:
    return Survey(action.id, survey.attempts + 1) if is_survey(state, action) else survey


def _after_observation(survey: Survey, answer: Observation, state: State) -> Survey:
    """Record the answer; repeat a survey with an unknown outcome."""
    if not 0 != survey.action_id == answer.cause:
        return survey
    if survey.is_over:
        return evolve(survey, action_id=0, scripts=survey.scripts[1:])
    if isinstance(answer, OutcomeUnknownObservation) and survey.attempts < MAX_ATTEMPTS:
        return Survey(attempts=survey.attempts)
    is_answer = isinstance(answer, SurveyObservation) and answer.is_complete
    answer_id, scripts = (answer.id, _find_due_scripts(state, answer)) if is_answer else (0, ())
    return Survey(0, survey.attempts, answer_id, is_over=True, scripts=scripts)


def _after_command(survey: Survey, action: CmdRunAction, state: State) -> Survey:
    return evolve(survey, action_id=action.id) if is_script(state, action) and not survey.action_id else survey


SURVEY = Concern("survey", {SurveyAction: _after_action, CmdRunAction: _after_command, Observation: _after_observation})


def parse_survey_skills(answer: Observation) -> SkillFiles:
    """Return the skills in an answer, without damaged ones."""
    if not isinstance(answer, SurveyObservation):
        return NO_SKILLS
    reader = SkillReader()
    for path, text in _parse_files(answer.content):
        _add_file(reader, path, text)
    return reader.to_skill_files()


async def parse_survey_skills_in_turns(answer: Observation) -> SkillFiles:
    """Like `parse_survey_skills`, but yield to the event loop after each file."""
    reader = SkillReader()
    for path, text in _parse_files(answer.content) if isinstance(answer, SurveyObservation) else ():
        _add_file(reader, path, text)
        await asyncio.sleep(0)
    return reader.to_skill_files()


def _add_file(reader: SkillReader, path: str, text: str | None) -> None:
    if text is None:
        reader.leave_out(path)
    else:
        reader.add(path, text)


def _parse_files(output: str) -> Iterator[tuple[str, str | None]]:
    """Yield the path and the text of each file; a path without a text is the first file that was left out."""
    for line in output.splitlines():
        if not line.startswith(FILE_MARK):
            continue
        parts = line.removeprefix(FILE_MARK).split()
        try:
            path, *rest = (base64.b64decode(part, validate=True).decode(errors="replace") for part in parts)
            (content,) = rest or (None,)
        except (ValueError, binascii.Error):
            continue
        yield path, content
