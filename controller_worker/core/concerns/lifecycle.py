"""The agent's state: the current one, the one requested by a user, and the agent's end of its turn.

Holds: each state is announced by one `AgentStateChangedObservation`, a user's request before the end of the agent's
turn.
Differs: a message does not abandon the running action, a resumed conversation takes a step, and an agent does not end
its turn while a message is unanswered. In the original, each of these leaves a conversation stuck or a message without
an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from broker.contract import (
    TERMINAL_STATES,
    AgentFinishAction,
    AgentRejectAction,
    AgentState,
    AgentStateChangedObservation,
    ChangeAgentStateAction,
    Event,
    LoopDetectionObservation,
    MessageAction,
    ModelCallFailed,
    ModelReply,
    Observation,
)
from broker.log import ANSWERS, REQUESTABLE_STATES
from controller_worker.core.announcement import announce
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.concerns import acceptance, delegation, long_work, opening, survey
from controller_worker.core.concerns.confirmation import is_answer
from controller_worker.core.concerns.loops import find_recovered_state
from controller_worker.core.concerns.model_calls import is_overflow
from controller_worker.core.effects import Effect, Rest
from controller_worker.core.pending import is_user_message

if TYPE_CHECKING:
    from controller_worker.core.state import State


@dataclass(frozen=True)
class Lifecycle:
    """The status of the agent.

    Attributes:
        requested: a state requested by a user, not announced yet.
        ending: how the agent ends its turn (finished, rejected, a question, an error), not announced yet.
        error_code: the class of the last error, or empty.
        result_id: the action that ended the latest turn.
    """

    agent_state: AgentState = AgentState.LOADING
    requested: AgentState | None = None
    ending: AgentState | None = None
    last_error: str = ""
    error_code: str = ""
    result_id: int = 0


def _after_reply(lifecycle: Lifecycle, reply: ModelReply, state: State) -> Lifecycle:
    has_error = lifecycle.last_error or lifecycle.error_code
    return evolve(lifecycle, last_error="", error_code="") if has_error and reply.service == "agent" else lifecycle


def _after_failure(lifecycle: Lifecycle, failure: ModelCallFailed, state: State) -> Lifecycle:
    if is_overflow(state, failure):
        return lifecycle
    ending = lifecycle.ending if failure.retry_at is not None else AgentState.ERROR
    return evolve(lifecycle, ending=ending, last_error=failure.last_error, error_code=failure.code)


def _after_message(lifecycle: Lifecycle, message: MessageAction, state: State) -> Lifecycle:
    if is_user_message(message):
        return evolve(lifecycle, ending=None, requested=_drop_if_current(lifecycle, AgentState.RUNNING))
    if message.wait_for_response:
        return _end_turn(lifecycle, message, state, AgentState.AWAITING_USER_INPUT)
    return lifecycle


def _after_finish(lifecycle: Lifecycle, finish: AgentFinishAction, state: State) -> Lifecycle:
    return _end_turn(lifecycle, finish, state, AgentState.FINISHED)


def _after_reject(lifecycle: Lifecycle, reject: AgentRejectAction, state: State) -> Lifecycle:
    return _end_turn(lifecycle, reject, state, AgentState.REJECTED)


def _after_request(lifecycle: Lifecycle, request: ChangeAgentStateAction, state: State) -> Lifecycle:
    if request.agent_state in REQUESTABLE_STATES:
        return evolve(lifecycle, requested=_drop_if_current(lifecycle, request.agent_state))
    return evolve(lifecycle, requested=request.agent_state) if is_answer(state, request) else lifecycle


def _after_loop(lifecycle: Lifecycle, event: LoopDetectionObservation, state: State) -> Lifecycle:
    if not state.loops.recovery:
        return lifecycle
    wanted = lifecycle.requested or find_recovered_state(state)
    return evolve(lifecycle, requested=_drop_if_current(lifecycle, wanted))


def _after_change(lifecycle: Lifecycle, change: AgentStateChangedObservation, state: State) -> Lifecycle:
    was = lifecycle.agent_state
    now = change.agent_state
    requested = lifecycle.requested
    ending = lifecycle.ending
    if requested is now or (requested in ANSWERS and now in ANSWERS):
        requested = None
    if now is ending or now in TERMINAL_STATES:
        ending = None
    lifecycle = evolve(lifecycle, agent_state=now, requested=requested, ending=ending)
    if now is AgentState.ERROR:
        # The error answers earlier requests: an older request to resume must not revive a conversation that kills
        # workers.
        return evolve(lifecycle, requested=None, last_error=change.reason, error_code=change.code)
    if now is AgentState.RUNNING and was is AgentState.ERROR:
        return evolve(lifecycle, last_error="", error_code="")
    return lifecycle


def _after_observation(lifecycle: Lifecycle, observation: Observation, state: State) -> Lifecycle:
    if acceptance.is_refusal(state, observation):
        return evolve(lifecycle, ending=None)
    failure = opening.find_failure(state, observation) or survey.find_failure(state, observation)
    if failure is None:
        return lifecycle
    reason, code = failure
    return evolve(lifecycle, ending=AgentState.ERROR, last_error=reason, error_code=code)


def _drop_if_current(lifecycle: Lifecycle, wanted: AgentState) -> AgentState | None:
    """Return the state to request. A request for the current state only cancels an earlier request."""
    return None if wanted is lifecycle.agent_state else wanted


def _end_turn(lifecycle: Lifecycle, event: Event, state: State, ending: AgentState) -> Lifecycle:
    """Record that the agent ends its turn, unless a user's message arrived after its prompt was made.

    Differs: the original finishes anyway, and the user's message stays unanswered.
    """
    if state.inbox.is_reply_outdated or state.inbox.message is not None:
        return lifecycle
    return evolve(lifecycle, ending=ending, result_id=event.id)


def announce_request(state: State, now: datetime) -> Effect | None:
    """Announce the state that a user requested."""
    requested = state.lifecycle.requested
    return None if requested is None else announce(state, requested)


def end_turn(state: State, now: datetime) -> Effect | None:
    """Announce how the agent ends its turn. A finish is checked first if a check is required."""
    lifecycle = state.lifecycle
    if lifecycle.ending is None or not _can_announce_end(state):
        return None
    if long_work.needs_verification(state):
        return long_work.verify_finish(state) if lifecycle.agent_state is AgentState.RUNNING else Rest()
    if acceptance.needs_check(state):
        return acceptance.make_check(state) if lifecycle.agent_state is AgentState.RUNNING else Rest()
    if acceptance.needs_verdict(state):
        return None
    return announce(state, lifecycle.ending, lifecycle.last_error, code=lifecycle.error_code)


def rest_unless_working(state: State, now: datetime) -> Effect | None:
    """Rest while the agent is in a state without work."""
    is_working = state.lifecycle.agent_state in (AgentState.RUNNING, AgentState.USER_CONFIRMED)
    return None if is_working else Rest()


def _can_announce_end(state: State) -> bool:
    """Return whether the end of the turn can be announced.

    Except for an error, the turn's other calls and the questions of MCP servers come first.
    """
    if state.lifecycle.agent_state not in (AgentState.RUNNING, AgentState.PAUSED):
        return False
    is_error = state.lifecycle.ending is AgentState.ERROR
    return is_error or not (state.tools.pending or state.tools.questions or delegation.find_unanswered(state))


LIFECYCLE = Concern(
    "lifecycle",
    {
        AgentStateChangedObservation: _after_change,
        ModelReply: _after_reply,
        ModelCallFailed: _after_failure,
        MessageAction: _after_message,
        AgentFinishAction: _after_finish,
        AgentRejectAction: _after_reject,
        ChangeAgentStateAction: _after_request,
        LoopDetectionObservation: _after_loop,
        Observation: _after_observation,
    },
)
