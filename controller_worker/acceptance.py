"""Whether a finish counts: a command in the workspace decides, and a refusal sends the agent back to work.

Holds: pure; the command is an action of the environment like any other, so it is journalled, runs once and survives
every worker; nothing is checked during a pause; a finish is refused `max_refusals` times, and the next time the
conversation ends in an error.
Differs: the original takes the agent's word.
"""

from __future__ import annotations

from dataclasses import replace as changed

from broker.actions import CmdRunAction
from broker.agent_state import AgentState
from broker.events import Action, EventSource, Observation
from broker.observations import CmdOutputObservation, FinishRefusedObservation
from controller_worker.announcement import announce
from controller_worker.effects import Append
from controller_worker.state import Acceptance, PendingAction, State, replace

NOT_REACHED = "GoalNotReachedError: The check of the goal failed each time the agent finished"
NOT_REACHED_CODE = "goal_not_reached"

REFUSED = (
    "Your finish was not accepted ({refusals} of {limit} times): the check `{check}` must end with exit code 0, and it "
    "did not; its output stands above. The task is not done yet. Find out why, go on working, and finish when the "
    "check would pass."
)


def wants_check(state: State) -> bool:
    """Say whether the end that the agent wants has to be checked first."""
    return state.ending is AgentState.FINISHED and state.agent.goal is not None and not state.acceptance.is_accepted


def check(state: State) -> Append:
    """Return the check, to run in a shell of its own."""
    goal = state.agent.goal
    assert goal is not None
    command = CmdRunAction(
        command=goal.check,
        source=EventSource.ENVIRONMENT,
        blocking=True,
        is_static=True,
        timeout=goal.timeout_seconds,
    )
    return Append((command,))


def is_check(state: State, action: Action) -> bool:
    """Say whether an action is the check of the finish that waits for it."""
    return wants_check(state) and isinstance(action, CmdRunAction) and action.source is EventSource.ENVIRONMENT


def after_start(state: State, action: Action) -> State:
    """Return the state after the check was begun; it is no step of the agent's, so not one of a loop either."""
    acceptance = changed(state.acceptance, check_id=action.id)
    return replace(state, pending=(*state.pending, PendingAction(action.id)), acceptance=acceptance)


def after_refusal(state: State, told: FinishRefusedObservation) -> State:
    """Return the state after the agent was told; a hook tells it at once, before the finish has led to anything."""
    ending = None if state.ending is AgentState.FINISHED else state.ending
    was = state.acceptance
    corrections = was.corrections + (told.reason == "output")
    return replace(state, ending=ending, acceptance=Acceptance(refusals=was.refusals, corrections=corrections))


def after_check(state: State, result: Observation) -> State:
    """Return the state after the check's result: the finish stands, or the work goes on."""
    was = changed(state.acceptance, check_id=0)
    if isinstance(result, CmdOutputObservation) and result.exit_code == 0:
        return replace(state, acceptance=changed(was, is_accepted=True))
    return replace(state, ending=None, acceptance=changed(was, refusals=was.refusals + 1, is_refused=True))


def refuse(state: State) -> Append:
    """Return what tells the agent that its finish was refused, or the end when that was once too often."""
    goal = state.agent.goal
    assert goal is not None
    refusals = state.acceptance.refusals
    if refusals > goal.max_refusals:
        return announce(state, AgentState.ERROR, NOT_REACHED, code=NOT_REACHED_CODE)
    text = REFUSED.format(refusals=refusals, limit=goal.max_refusals, check=goal.check)
    return Append((FinishRefusedObservation(content=text),))


def forgotten(state: State) -> State:
    """Return the state when a person speaks: the next finish is another one."""
    return replace(state, acceptance=Acceptance())
