"""Acceptance of a finish: its output matches the schema, features and the goal's check pass, then a critic agrees.

Holds: pure. An invalid output is refused in the append that records the turn, for every agent. The command is an action
of the environment: it is journalled, runs once and survives every worker. The critic's verdict is in the log with its
reply. Nothing is checked during a pause. A refusal sends the agent back to work; one more than `max_refusals` or
`max_corrections` ends the conversation in an error.
Differs: the original accepts every finish, and its finish has only text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract import (
    Action,
    AgentFinishAction,
    AgentState,
    CmdOutputObservation,
    CmdRunAction,
    Event,
    EventSource,
    FeatureListObservation,
    FinishRefusedObservation,
    FinishVerdictObservation,
    GoalSpec,
    MessageAction,
    Observation,
    OutputSpec,
)
from broker.tools import find_violations
from controller_worker.core.announcement import announce
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.concerns import long_work
from controller_worker.core.concerns.limits import find_reached_cost_limit
from controller_worker.core.effects import Append, CallModel, Effect
from controller_worker.core.pending import is_user_message

if TYPE_CHECKING:
    from controller_worker.core.state import State

NOT_REACHED = "GoalNotReachedError: The check of the goal failed each time the agent finished"
NOT_REACHED_CODE = "goal_not_reached"
NOT_VALID = "OutputNotValidError: The output of the finish did not fit its schema"
NOT_VALID_CODE = "output_not_valid"

REFUSED = (
    "Your finish was not accepted ({refusals} of {limit} times): the check `{check}` must exit with code 0 and did "
    "not; see its output above. The task is not done yet. Find out why, keep working, and finish once the check passes."
)
REFUSED_BY_CRITIC = (
    "Your finish was not accepted ({refusals} of {limit} times): the reviewer of your work does not consider the task "
    "done; see the reason above. Keep working, and finish once that reason no longer applies."
)
REFUSED_BY_FEATURES = (
    "Your finish was not accepted ({refusals} of {limit} times): {failing}. The work is done when every feature of the "
    "list passes its check."
)
REFUSED_BY_SCHEMA = (
    "Your finish was not accepted: its `output` does not fit the schema.\n{problems}\n"
    "Correct it, and call finish again with the whole output."
)


@dataclass(frozen=True)
class Acceptance:
    """The decisions about the agent's finishes since the user's last message.

    Attributes:
        check_id: the action that checks the finish while it runs; 0 for none.
        refusals: number of refused finishes.
        is_refused: the latest finish was refused, and the agent has no message about it yet.
        is_checked: the check has accepted the latest finish, and the critic is asked.
        is_accepted: the latest finish counts.
        is_by_critic: the critic refused the latest finish.
        corrections: how often the output of a finish did not fit its schema.
    """

    check_id: int = 0
    refusals: int = 0
    is_refused: bool = False
    is_checked: bool = False
    is_accepted: bool = False
    is_by_critic: bool = False
    corrections: int = 0


def check_outputs(events: Iterable[Event], output: OutputSpec | None) -> tuple[Event, ...]:
    """Return the events of a turn, with a refusal after each finish whose output is invalid."""
    if output is None:
        return tuple(events)
    found: list[Event] = []
    refusals: list[Event] = []
    for event in events:
        found.append(event)
        problems = find_violations(event.outputs, output.json_schema) if isinstance(event, AgentFinishAction) else []
        if problems:
            text = REFUSED_BY_SCHEMA.format(problems="\n".join(f"- {problem}" for problem in problems))
            refusals.append(FinishRefusedObservation(content=text, reason="output"))
    return (*found, *refusals)


def needs_check(state: State) -> bool:
    """Return whether the agent's finish must be checked before it counts."""
    goal = _find_goal(state)
    return goal is not None and goal.check is not None and not state.acceptance.is_checked


def needs_verdict(state: State) -> bool:
    """Return whether a critic must be asked before the agent's finish counts."""
    goal = _find_goal(state)
    return goal is not None and goal.critic is not None and (goal.check is None or state.acceptance.is_checked)


def _find_goal(state: State) -> GoalSpec | None:
    is_finish = state.lifecycle.ending is AgentState.FINISHED and not state.acceptance.is_accepted
    return state.setup.agent.goal if is_finish else None


def is_check(state: State, action: Action) -> bool:
    """Return whether this action is the pending check."""
    return isinstance(action, CmdRunAction) and action.source is EventSource.ENVIRONMENT and needs_check(state)


def is_refusal(state: State, event: Observation) -> bool:
    """Return whether this observation refuses a finish: a failed check, a bad verdict, a hook or a schema."""
    match event:
        case FeatureListObservation():
            return long_work.is_refused(state, event)
        case FinishRefusedObservation():
            return state.lifecycle.ending is AgentState.FINISHED
        case FinishVerdictObservation():
            return needs_verdict(state) and not event.is_accepted
    return 0 != state.acceptance.check_id == event.cause and not _has_passed(event)


def _has_passed(result: Observation) -> bool:
    return isinstance(result, CmdOutputObservation) and result.exit_code == 0


def _after_finish(acceptance: Acceptance, event: Event, state: State) -> Acceptance:
    """Forget an earlier acceptance, because it belongs to an earlier finish."""
    return evolve(acceptance, is_checked=False, is_accepted=False, is_by_critic=False)


def _after_refusal(acceptance: Acceptance, event: FinishRefusedObservation, state: State) -> Acceptance:
    """Note that the agent knows of a refusal. A hook refuses at once, before the finish has any effect."""
    corrections = acceptance.corrections + (event.reason == "output")
    return Acceptance(refusals=acceptance.refusals, corrections=corrections)


def _after_features(acceptance: Acceptance, event: FeatureListObservation, state: State) -> Acceptance:
    if not long_work.is_refused(state, event):
        return acceptance
    return evolve(acceptance, refusals=acceptance.refusals + 1, is_refused=True)


def _after_verdict(acceptance: Acceptance, event: FinishVerdictObservation, state: State) -> Acceptance:
    if not needs_verdict(state):  # a user's message took the finish back
        return acceptance
    if event.is_accepted:
        return evolve(acceptance, is_accepted=True)
    return evolve(acceptance, refusals=acceptance.refusals + 1, is_refused=True, is_by_critic=True)


def _after_observation(acceptance: Acceptance, event: Observation, state: State) -> Acceptance:
    if not 0 != acceptance.check_id == event.cause:
        return acceptance
    if not _has_passed(event):
        return evolve(acceptance, check_id=0, refusals=acceptance.refusals + 1, is_refused=True)
    goal = state.setup.agent.goal
    has_critic = goal is not None and goal.critic is not None
    return evolve(acceptance, check_id=0, is_checked=has_critic, is_accepted=not has_critic)


def _after_command(acceptance: Acceptance, event: CmdRunAction, state: State) -> Acceptance:
    return evolve(acceptance, check_id=event.id) if is_check(state, event) else acceptance


def _after_message(acceptance: Acceptance, event: MessageAction, state: State) -> Acceptance:
    """Reset at a user's message, because the next finish is a new one."""
    return Acceptance() if is_user_message(event) else acceptance


def make_check(state: State) -> Append:
    """Return the check as an action in a separate shell."""
    goal = state.setup.agent.goal
    assert goal is not None
    assert goal.check is not None
    command = CmdRunAction(
        command=goal.check,
        source=EventSource.ENVIRONMENT,
        blocking=True,
        is_static=True,
        timeout=goal.timeout_seconds,
    )
    return Append((command,))


def refuse_finish(state: State, now: datetime) -> Effect | None:
    """Tell the agent that its finish was refused; end the work after too many refusals."""
    if not state.acceptance.is_refused:
        return None
    goal = state.setup.agent.goal or long_work.DEFAULT_GOAL
    refusals = state.acceptance.refusals
    if refusals > goal.max_refusals:
        return announce(state, AgentState.ERROR, NOT_REACHED, code=NOT_REACHED_CODE)
    failing = long_work.render_failing(state)
    text = REFUSED_BY_FEATURES if failing else REFUSED_BY_CRITIC if state.acceptance.is_by_critic else REFUSED
    content = text.format(refusals=refusals, limit=goal.max_refusals, check=goal.check, failing=failing)
    return Append((FinishRefusedObservation(content=content),))


def end_corrections(state: State, now: datetime) -> Effect | None:
    """End the work after too many corrections of the output."""
    output = state.setup.agent.output
    if output is None or state.acceptance.corrections <= output.max_corrections:
        return None
    return announce(state, AgentState.ERROR, NOT_VALID, code=NOT_VALID_CODE)


def ask_critic(state: State, now: datetime) -> Effect | None:
    """Call the critic; end the work if no further cost is allowed. The call is not a step."""
    if not needs_verdict(state):
        return None
    refusal = find_reached_cost_limit(state)
    if refusal is not None:
        return announce(state, AgentState.ERROR, refusal.text, code=refusal.code)
    return CallModel(state.usage.iteration + 1, state.calls.attempt + 1)


ACCEPTANCE = Concern(
    "acceptance",
    {
        AgentFinishAction: _after_finish,
        FinishRefusedObservation: _after_refusal,
        FeatureListObservation: _after_features,
        FinishVerdictObservation: _after_verdict,
        Observation: _after_observation,
        CmdRunAction: _after_command,
        MessageAction: _after_message,
    },
)
