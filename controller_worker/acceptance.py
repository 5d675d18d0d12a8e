"""Whether a finish counts: a command in the workspace decides, then a critic; a refusal sends the agent back to work.

Holds: pure; the command is an action of the environment like any other, so it is journalled, runs once and survives
every worker; the critic's verdict is in the log with the reply that it was made of; nothing is checked during a pause;
a finish is refused `max_refusals` times, and the next time the conversation ends in an error.
Differs: the original takes the agent's word.
"""

from __future__ import annotations

from dataclasses import replace as changed

from broker.actions import CmdRunAction
from broker.agent_state import AgentState
from broker.events import Action, EventSource, Observation
from broker.observations import CmdOutputObservation, FinishRefusedObservation, FinishVerdictObservation
from broker.specs import GoalSpec
from controller_worker.announcement import announce
from controller_worker.control_flags import cost_limit_reached
from controller_worker.effects import Append, CallModel, Effect
from controller_worker.state import Acceptance, State, replace, with_pending

NOT_REACHED = "GoalNotReachedError: The check of the goal failed each time the agent finished"
NOT_REACHED_CODE = "goal_not_reached"

REFUSED = (
    "Your finish was not accepted ({refusals} of {limit} times): the check `{check}` must end with exit code 0, and it "
    "did not; its output stands above. The task is not done yet. Find out why, go on working, and finish when the "
    "check would pass."
)
REFUSED_BY_CRITIC = (
    "Your finish was not accepted ({refusals} of {limit} times): whoever judged your work does not think that the task "
    "is done; the reason stands above. Go on working, and finish when what is said there no longer holds."
)


def wants_check(state: State) -> bool:
    """Say whether the end that the agent wants has to be checked first."""
    goal = _goal_of_finish(state)
    return goal is not None and goal.check is not None and not state.acceptance.is_checked


def wants_verdict(state: State) -> bool:
    """Say whether a critic has to be asked before the end that the agent wants."""
    goal = _goal_of_finish(state)
    return goal is not None and goal.critic is not None and (goal.check is None or state.acceptance.is_checked)


def _goal_of_finish(state: State) -> GoalSpec | None:
    return state.agent.goal if state.ending is AgentState.FINISHED and not state.acceptance.is_accepted else None


def check(state: State) -> Append:
    """Return the check, to run in a shell of its own."""
    goal = state.agent.goal
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


def ask_critic(state: State) -> Effect:
    """Return the call of the critic, which is no step; or the end if it may cost nothing more."""
    refusal = cost_limit_reached(state)
    if refusal is not None:
        return announce(state, AgentState.ERROR, refusal.text, code=refusal.code)
    return CallModel(state.iteration + 1, state.attempt + 1)


def after_start(state: State, action: Action) -> State | None:
    """Return the state after the check of a finish was begun; None if the action is not the one that is wanted."""
    is_check = isinstance(action, CmdRunAction) and action.source is EventSource.ENVIRONMENT
    if not (is_check and wants_check(state)):
        return None
    return replace(with_pending(state, action.id), acceptance=changed(state.acceptance, check_id=action.id))


def after_finish(state: State) -> State:
    """Return the state after the agent has said that it is done; what was accepted was an earlier finish."""
    was = state.acceptance
    return replace(state, acceptance=changed(was, is_checked=False, is_accepted=False, is_by_critic=False))


def after_refusal(state: State, told: FinishRefusedObservation) -> State:
    """Return the state after the agent was told; a hook tells it at once, before the finish has led to anything."""
    ending = None if state.ending is AgentState.FINISHED else state.ending
    was = state.acceptance
    corrections = was.corrections + (told.reason == "output")
    return replace(state, ending=ending, acceptance=Acceptance(refusals=was.refusals, corrections=corrections))


def after_check(state: State, result: Observation) -> State:
    """Return the state after the check's result: the finish stands, or the critic is asked, or the work goes on."""
    was = changed(state.acceptance, check_id=0)
    if not isinstance(result, CmdOutputObservation) or result.exit_code != 0:
        return _refused(state, was)
    goal = state.agent.goal
    has_critic = goal is not None and goal.critic is not None
    return replace(state, acceptance=changed(was, is_checked=has_critic, is_accepted=not has_critic))


def after_verdict(state: State, verdict: FinishVerdictObservation) -> State:
    """Return the state after the critic has spoken; of a finish that a person's message took back, it says nothing."""
    if not wants_verdict(state):
        return state
    if verdict.is_accepted:
        return replace(state, acceptance=changed(state.acceptance, is_accepted=True))
    return _refused(state, changed(state.acceptance, is_by_critic=True))


def _refused(state: State, was: Acceptance) -> State:
    return replace(state, ending=None, acceptance=changed(was, refusals=was.refusals + 1, is_refused=True))


def refuse(state: State) -> Append:
    """Return what tells the agent that its finish was refused, or the end when that was once too often."""
    goal = state.agent.goal
    assert goal is not None
    refusals = state.acceptance.refusals
    if refusals > goal.max_refusals:
        return announce(state, AgentState.ERROR, NOT_REACHED, code=NOT_REACHED_CODE)
    text = REFUSED_BY_CRITIC if state.acceptance.is_by_critic else REFUSED
    told = text.format(refusals=refusals, limit=goal.max_refusals, check=goal.check)
    return Append((FinishRefusedObservation(content=told),))


def forgotten(state: State) -> State:
    """Return the state when a person speaks: the next finish is another one."""
    return replace(state, acceptance=Acceptance())
