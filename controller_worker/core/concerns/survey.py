"""The survey of a workspace before the first recall, and the setup scripts of its repository.

Only a tool worker can read a workspace. So the survey is an action of the environment and its answer an observation,
both hidden from the model. The log stays the only source, and a replay needs no workspace.

Holds: a message is recalled whatever the outcome of the survey, except that a task that names skills waits for a
survey that was neither stopped nor failed. A workspace that cannot be read counts as empty. A stop
does not wait for the answer. A script is started once, and its failure does not stop the work.
Differs: the output of a failed setup script is shown to the model. No hook is written into a directory named by a user,
where it would also run outside the sandbox.
"""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract import (
    HOOK_SCRIPT,
    NO_SKILLS,
    SETUP_SCRIPT,
    Action,
    AgentState,
    ChangeAgentStateAction,
    CmdRunAction,
    Event,
    EventSource,
    MessageAction,
    Observation,
    OutcomeUnknownObservation,
    SkillFiles,
    SkillReader,
    SurveyAction,
    SurveyObservation,
    parse_surveyed_files,
)
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.effects import Append, AwaitTools, Effect
from controller_worker.core.pending import is_run_request

if TYPE_CHECKING:
    from controller_worker.core.state import State

MAX_ATTEMPTS = 3
FAILED_CODE = "mcp_server_unavailable"
SKILLS_CODE = "skills_unavailable"
"""As tool workers name it, see `tool_worker.errors.SkillsUnavailable`."""
INCOMPLETE = "The skills of the task cannot be used: the search of the workspace did not end."
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
        has_failed: an MCP server or a skill of the task cannot be used; also if a survey with skills was stopped.
        is_repeated: a user has resumed the conversation after such a failure.
    """

    action_id: int = 0
    attempts: int = 0
    answer_id: int = 0
    is_over: bool = False
    scripts: tuple[str, ...] = ()
    has_failed: bool = False
    is_repeated: bool = False


def needs_survey(state: State) -> bool:
    """Return whether to survey the workspace before the first recall.

    The survey also installs the task's skills, and lists the tools of its servers.
    """
    setup = state.setup
    survey = state.survey
    is_running = (state.lifecycle.requested or state.lifecycle.agent_state) is AgentState.RUNNING
    if survey.is_over or not (_is_first_message(state) or (survey.is_repeated and is_running)):
        return False
    has_files = setup.workspace.path is not None or state.opening.is_open
    return bool(setup.mcp_servers or setup.skills) or (has_files and setup.agent.enable_workspace_skills)


def needs_script(state: State) -> bool:
    """Return whether a script of the repository must run, or end, before the first recall."""
    return _is_first_message(state) and bool(state.survey.scripts)


def _is_first_message(state: State) -> bool:
    message = state.inbox.message
    return message is not None and message.is_first and state.lifecycle.requested in (None, AgentState.RUNNING)


def lacks_skills(state: State) -> bool:
    """Return whether the task's skills are not installed, because the survey has failed or a stop comes before it."""
    survey, message = state.survey, state.inbox.message
    is_due = not survey.is_over and message is not None and message.is_first
    return bool(state.setup.skills) and (survey.has_failed or is_due)


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
    if not is_surveying:
        return Append((_make_script_action(state.survey.scripts[0]),))
    setup = state.setup
    return Append(
        (
            SurveyAction(
                servers=setup.mcp_servers or None,
                with_skills=setup.agent.enable_workspace_skills,
                skills=setup.skills or None,
            ),
        )
    )


def find_failure(state: State, event: Observation) -> tuple[str, str] | None:
    """Return reason and code if a server or a skill of the task cannot be used; None for any other observation.

    A survey with an unknown outcome is retried. One that a user stopped has not failed.
    """
    survey = state.survey
    if not 0 != survey.action_id == event.cause or survey.is_over or event.source is EventSource.AGENT:
        return None
    setup = state.setup
    if isinstance(event, SurveyObservation):
        if event.failure:
            return event.failure, event.failure_code or FAILED_CODE
        return None if event.is_complete or not setup.skills else (INCOMPLETE, SKILLS_CODE)
    if not (setup.mcp_servers or setup.skills) or _is_unknown(survey, event):
        return None
    return event.content, FAILED_CODE if setup.mcp_servers else SKILLS_CODE


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
    have_run = state.survey.is_repeated and not setup.skills
    if not isinstance(answer, SurveyObservation) or setup.delegate_level or have_run:
        return ()
    if not (setup.agent.enable_cmd and setup.agent.enable_workspace_skills):
        return ()
    may_run = (SETUP_SCRIPT, HOOK_SCRIPT) if setup.workspace.path is None else (SETUP_SCRIPT,)
    return tuple(name for name in may_run if name in answer.scripts)


def _after_action(survey: Survey, action: SurveyAction, state: State) -> Survey:
    if not is_survey(state, action):
        return survey
    return evolve(survey, action_id=action.id, attempts=survey.attempts + 1)


def _after_observation(survey: Survey, answer: Observation, state: State) -> Survey:
    """Record the answer; repeat a survey with an unknown outcome."""
    if not 0 != survey.action_id == answer.cause:
        return survey
    if survey.is_over:
        return evolve(survey, action_id=0, scripts=survey.scripts[1:])
    if _is_unknown(survey, answer):
        return evolve(survey, action_id=0)
    is_answer = isinstance(answer, SurveyObservation) and answer.is_complete
    is_read = is_answer and state.setup.agent.enable_workspace_skills
    answer_id, scripts = (answer.id, _find_due_scripts(state, answer)) if is_read else (survey.answer_id, ())
    has_failed = find_failure(state, answer) is not None
    if state.setup.skills and (has_failed or not is_answer):
        has_failed, scripts = True, ()  # they run before the first step, after the next survey
    return Survey(0, survey.attempts, answer_id, is_over=True, scripts=scripts, has_failed=has_failed)


def _is_unknown(survey: Survey, answer: Observation) -> bool:
    return isinstance(answer, OutcomeUnknownObservation) and survey.attempts < MAX_ATTEMPTS


def _after_request(survey: Survey, event: Event, state: State) -> Survey:
    """Repeat a failed survey when a user resumes the conversation; with skills, also a stopped one."""
    if not (survey.has_failed and is_run_request(event)):
        return survey
    return Survey(answer_id=survey.answer_id, is_repeated=True)


def _after_command(survey: Survey, action: CmdRunAction, state: State) -> Survey:
    return evolve(survey, action_id=action.id) if is_script(state, action) and not survey.action_id else survey


SURVEY = Concern(
    "survey",
    {
        SurveyAction: _after_action,
        CmdRunAction: _after_command,
        Observation: _after_observation,
        MessageAction: _after_request,
        ChangeAgentStateAction: _after_request,
    },
)


def parse_survey_skills(answer: Observation) -> SkillFiles:
    """Return the skills in an answer, without damaged ones."""
    if not isinstance(answer, SurveyObservation):
        return NO_SKILLS
    reader = SkillReader()
    for path, text in parse_surveyed_files(answer.content):
        reader.add_surveyed(path, text)
    return _with_notices(reader, answer)


async def parse_survey_skills_in_turns(answer: Observation) -> SkillFiles:
    """Like `parse_survey_skills`, but yield to the event loop after each file."""
    if not isinstance(answer, SurveyObservation):
        return NO_SKILLS
    reader = SkillReader()
    for path, text in parse_surveyed_files(answer.content):
        reader.add_surveyed(path, text)
        await asyncio.sleep(0)
    return _with_notices(reader, answer)


def _with_notices(reader: SkillReader, answer: SurveyObservation) -> SkillFiles:
    """Return the skills, and the reasons why servers of skills are not offered."""
    files = reader.to_skill_files()
    return replace(files, unreadable=(*files.unreadable, *(answer.left_out or ())))
