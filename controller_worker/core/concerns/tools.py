"""Tools: the actions of a turn, from the log to their observations.

Holds: every runnable action is settled by exactly one observation. The calls of a turn run in order, up to the first
that waits for a user's confirmation.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract import (
    TERMINAL_STATES,
    Action,
    AgentState,
    AgentStateChangedObservation,
    ConfirmationStatus,
    DigestWorkspaceAction,
    EventsLostObservation,
    EventSource,
    FeatureCheckAction,
    FinishRefusedObservation,
    FinishVerdictObservation,
    LoopDetectionObservation,
    MCPQuestionObservation,
    MessageAction,
    Observation,
    SaveProgressAction,
)
from controller_worker.core.concern import Concern
from controller_worker.core.concerns import acceptance, long_work, opening, planning, survey
from controller_worker.core.effects import Append, AwaitTools, CarryOut, Effect
from controller_worker.core.pending import PendingAction, Tools, find_runnable, is_user_message
from controller_worker.core.stuck_detector import Trace, trace_event

if TYPE_CHECKING:
    from controller_worker.core.state import State


OWN_ACTIONS = frozenset[type[Action]]({FeatureCheckAction, SaveProgressAction, DigestWorkspaceAction})


def is_own_action(state: State, action: Action) -> bool:
    """Return whether this is an action of the controller itself. Steps, loops and confirmations ignore it."""
    return (
        type(action) in OWN_ACTIONS  # three times as fast as `isinstance`; they have no subclasses
        or opening.is_opening(state, action)
        or survey.is_survey(state, action)
        or survey.is_script(state, action)
        or acceptance.is_check(state, action)
    )


def trace_action(state: State, action: Action) -> Trace | None:
    """Return the trace of an action for loop detection; None if it is off or the action is hidden."""
    if not state.setup.agent.enable_stuck_detection or action.__dict__.get("hidden"):
        return None
    if action.tool_call_metadata is not None:
        return trace_event(action, action.tool_call_metadata.reply_id)
    return trace_event(action, state.calls.reply_id if action.source is EventSource.AGENT else 0)


def _after_observation(tools: Tools, observation: Observation, state: State) -> Tools:
    left = tuple(action for action in tools.pending if action.id != observation.cause)
    if len(left) == len(tools.pending):
        return tools
    if isinstance(observation, MCPQuestionObservation) and observation.cause is not None:
        return Tools(left, (*tools.questions, (observation.cause, observation.id)))
    return Tools(left, tools.questions)


def _after_action(tools: Tools, action: Action, state: State) -> Tools:
    if is_own_action(state, action):
        return Tools((*tools.pending, PendingAction(action.id)), tools.questions)
    if not action.runnable:
        return tools
    pending = _make_pending(action, trace_action(state, action))
    replaced = action.__dict__.get("replaces")
    if replaced is None:
        asks = action.__dict__.get("asks")
        questions = tuple(asked for asked in tools.questions if asked[0] != asks)
        # What the person is asked comes before the calls that wait for their turn.
        return Tools((*tools.pending, pending) if asks is None else (pending, *tools.pending), questions)
    return Tools(tuple(pending if other.id == replaced else other for other in tools.pending), tools.questions)


def _drop_questions(tools: Tools, event: MessageAction | AgentStateChangedObservation, state: State) -> Tools:
    """Drop questions that were not asked yet: the user has sent a message instead, or the work is over."""
    is_over = is_user_message(event) if isinstance(event, MessageAction) else event.agent_state in TERMINAL_STATES
    return Tools(tools.pending) if tools.questions and is_over else tools


def _make_pending(action: Action, trace: Trace | None) -> PendingAction:
    status = action.__dict__.get("confirmation_state", ConfirmationStatus.CONFIRMED)
    is_rejected = status is ConfirmationStatus.REJECTED
    is_awaiting = is_rejected or status is ConfirmationStatus.AWAITING_CONFIRMATION
    return PendingAction(action.id, action.tool_call_metadata, None if is_rejected else trace, is_awaiting)


def ask_person(state: State, now: datetime) -> Effect | None:
    """Ask the user the questions of an MCP server, once no other call is running.

    The answer may end the whole turn, and then a running call would be recorded as not executed.
    """
    if not state.tools.questions or (state.setup.agent.tool_concurrency > 1 and find_runnable(state)):
        return None
    return CarryOut(*state.tools.questions[0])


def await_tools(state: State, now: datetime) -> Effect | None:
    """Wait for the actions that may run; settle a plan that needs no confirmation; else ask for a confirmation."""
    if not state.tools.pending:
        return None
    runnable = find_runnable(state)
    effect = long_work.carry_out(state, runnable)
    if effect is not None:
        return effect
    ready = planning.select_up_to_plan(state, runnable)
    if state.plan.action_id in ready:
        return planning.accept_plan(state)
    if ready:
        return AwaitTools(ready[: state.setup.agent.tool_concurrency])
    asked = state.tools.pending[0].id
    return Append((AgentStateChangedObservation(agent_state=AgentState.AWAITING_USER_CONFIRMATION, action_id=asked),))


TOOLS = Concern(
    "tools",
    {
        # Events of the controller itself. They settle no action.
        AgentStateChangedObservation: _drop_questions,
        LoopDetectionObservation: None,
        FinishRefusedObservation: None,
        FinishVerdictObservation: None,
        EventsLostObservation: None,
        Observation: _after_observation,
        MessageAction: _drop_questions,
        Action: _after_action,
    },
)
