"""Model calls: the waits before the next one, and the effects of a failed one (OpenHands 1.8.8, 1.11).

A call waits for a time after a failure, or for a quota, a budget or a batch. The second kind of wait has no fixed end:
the governor, the ledger or the provider ends it. So the core keeps returning the call, and the loop
(`model.permits.call_permit`) asks for its permit at each wake-up.

Users see the error's own `last_error` (`controller_worker.providers.errors`): OpenHands' status value if there is one,
else `<class>: <text>`.

Holds: a wait for a quota shows as `rate_limited`, which OpenHands has. A wait for a budget or a batch shows as the wait
reason of a running conversation, because OpenHands has no state for it. No wait is longer than the conversation's own
time. After `MAX_OVERFLOWS` consecutive prompts that did not fit the model, the conversation ends in an error. A failure
is retried at the time in its event, whatever its code; without a time, the work ends in an error.
Differs: a condensation counts as no iteration, because it does nothing for the task. The original wraps some errors (an
unreachable provider) in a RuntimeError before it classifies them, and ends a lasting rate limit in a separate state.
Here each error has its own code, and a lasting rate limit becomes an error with or without listeners, because an
unwatched conversation must end too.
Does not: choose the time of the next attempt; the call's event has it (`providers.retry`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from broker.contract import (
    AgentState,
    AgentStateChangedObservation,
    ChangeAgentStateAction,
    CondensationRequestAction,
    Event,
    InterruptedObservation,
    LoopRecoveryAction,
    MessageAction,
    ModelCallAdmitted,
    ModelCallDeferred,
    ModelCallFailed,
    ModelReply,
    handles_requests,
)
from broker.log import WaitReason
from broker.runtime import DeckhandsError
from controller_worker.core.announcement import announce
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.concerns.acceptance import needs_verdict
from controller_worker.core.concerns.loops import find_chosen_loop
from controller_worker.core.effects import Append, CallModel, Effect, Park
from controller_worker.core.pending import is_run_request

if TYPE_CHECKING:
    from controller_worker.core.state import State


CONTEXT_WINDOW = "context_window"
"""The code of a prompt that does not fit the model."""
RATE_LIMIT = "rate_limit"
"""The code of a rate limited call, the only failure with its own state while it waits."""


def find_waiting_state(code: str) -> AgentState:
    """Return the state shown while a failed call waits for its next attempt."""
    return AgentState.RATE_LIMITED if code == RATE_LIMIT else AgentState.RUNNING


def find_error_code(error: Exception) -> str:
    """Return the class of an error; `unexpected` if it was not foreseen."""
    return error.code if isinstance(error, DeckhandsError) else "unexpected"


def render_last_error(error: Exception) -> str:
    """Return an error in OpenHands' form; only its name if it was not foreseen (1.11)."""
    if isinstance(error, DeckhandsError):
        return f"{type(error).__name__}: {error}"
    return (
        f"RuntimeError: There was an unexpected error while running the agent: {type(error).__name__}. "
        "You can ask the agent to try again."
    )


QUOTA = WaitReason.RATE_LIMIT.value
BUDGET = WaitReason.BUDGET.value
BATCH = WaitReason.BATCH.value

MAX_OVERFLOWS = 5
ASK_AGAIN_AFTER = timedelta(minutes=1)
ACQUIRE_AGAIN_AFTER = timedelta(minutes=5)

_SHOWN = {QUOTA: AgentState.RATE_LIMITED, BUDGET: AgentState.RUNNING}
_MAY_CALL = (AgentState.RUNNING, AgentState.RATE_LIMITED)


@dataclass(frozen=True, slots=True)
class RetryWait:
    """A wait before the next attempt: its reason and its end."""

    reason: str
    until: datetime


@dataclass(frozen=True, slots=True)
class Deferral:
    """The reason why a model call waits (quota, budget or batch), and the estimated end; None if unknown."""

    reason: str
    expected_at: datetime | None


@dataclass(frozen=True)
class ModelCalls:
    """The latest reply and the waits before the next one.

    Attributes:
        reply_id: the latest reply to the agent's own question.
        attempt: failed calls of the current step.
        wait: the wait after a failure.
        deferral: the wait for a permit.
        overflows: number of consecutive prompts that did not fit the model.
        wants_condensation: the latest reply still needs a condensation request.
    """

    reply_id: int = 0
    attempt: int = 0
    wait: RetryWait | None = None
    deferral: Deferral | None = None
    overflows: int = 0
    wants_condensation: bool = False


def _after_reply(calls: ModelCalls, reply: ModelReply, state: State) -> ModelCalls:
    return ModelCalls(
        reply_id=reply.id if reply.service == "agent" else calls.reply_id,
        overflows=calls.overflows if reply.service == "condenser" else 0,
        wants_condensation=calls.wants_condensation,
    )


def _after_deferral(calls: ModelCalls, deferral: ModelCallDeferred, state: State) -> ModelCalls:
    return evolve(calls, deferral=Deferral(deferral.code, deferral.expected_at))


def _after_admission(calls: ModelCalls, event: ModelCallAdmitted, state: State) -> ModelCalls:
    return evolve(calls, deferral=None)


def _after_state_change(calls: ModelCalls, change: AgentStateChangedObservation, state: State) -> ModelCalls:
    now = change.agent_state
    if now is AgentState.RUNNING and state.lifecycle.agent_state is AgentState.ERROR:
        calls = evolve(calls, attempt=0, wait=None)
    return calls if calls.deferral is None or now in _MAY_CALL else evolve(calls, deferral=None)


def _after_condensation_request(calls: ModelCalls, event: CondensationRequestAction, state: State) -> ModelCalls:
    return evolve(calls, wants_condensation=False)


def _after_recovery(calls: ModelCalls, choice: LoopRecoveryAction, state: State) -> ModelCalls:
    return calls if find_chosen_loop(state, choice) is None else evolve(calls, attempt=0, wait=None)


def _after_interruption(calls: ModelCalls, event: InterruptedObservation, state: State) -> ModelCalls:
    return evolve(calls, attempt=0, wait=None, deferral=None)


def _after_request(calls: ModelCalls, event: Event, state: State) -> ModelCalls:
    """End every wait when a user asks the agent to work."""
    return evolve(calls, attempt=0, wait=None, overflows=0) if is_run_request(event) else calls


def is_overflow(state: State, failure: ModelCallFailed) -> bool:
    """Return whether a prompt did not fit and a shorter history can be tried."""
    agent = state.setup.agent
    overflows = state.calls.overflows
    if failure.code != CONTEXT_WINDOW or overflows >= MAX_OVERFLOWS:
        return False
    return needs_verdict(state) or (agent.enable_history_truncation and handles_requests(agent.condenser))


def _after_failure(calls: ModelCalls, failure: ModelCallFailed, state: State) -> ModelCalls:
    if is_overflow(state, failure):
        # A critic's question is not the View: it is shortened without a condensation.
        wants_condensation = calls.wants_condensation or not needs_verdict(state)
        overflows = calls.overflows + 1
        return ModelCalls(calls.reply_id, overflows=overflows, wants_condensation=wants_condensation)
    if failure.retry_at is None:
        return evolve(calls, deferral=None, attempt=0, wait=None)
    return evolve(calls, deferral=None, attempt=failure.attempt, wait=RetryWait(failure.code, failure.retry_at))


def is_deferred(state: State) -> bool:
    """Return whether a call waits for its quota, its budget or its batch."""
    return state.calls.deferral is not None and state.lifecycle.agent_state in _MAY_CALL


def wait_for_permit(state: State, now: datetime) -> Effect | None:
    """Announce the wait, then keep returning the call."""
    deferral = state.calls.deferral
    if deferral is None or not is_deferred(state):
        return None
    shown = _SHOWN.get(deferral.reason, AgentState.RUNNING)
    return announce(state, shown) if shown is not state.lifecycle.agent_state else call_model(state, now)


def end_rate_limit(state: State, now: datetime) -> Effect | None:
    """Wait out a rate limit, then announce that the conversation runs again."""
    if state.lifecycle.agent_state is not AgentState.RATE_LIMITED:
        return None
    return _find_wait(state, now) or announce(state, AgentState.RUNNING)


def wait_for_retry(state: State, now: datetime) -> Effect | None:
    """Announce the state of the wait, then wait for the next attempt."""
    waiting = _find_wait(state, now)
    if waiting is None:
        return None
    shown = find_waiting_state(waiting.reason)
    return waiting if shown is state.lifecycle.agent_state else announce(state, shown)


def _find_wait(state: State, now: datetime) -> Park | None:
    wait = state.calls.wait
    deadline = state.usage.deadline
    if wait is None or now >= wait.until:
        return None
    return Park(wait.until if deadline is None else min(wait.until, deadline), wait.reason)


def condense(state: State, now: datetime) -> Effect | None:
    """Request a condensation after a prompt that did not fit."""
    return Append((CondensationRequestAction(),)) if state.calls.wants_condensation else None


def call_model(state: State, now: datetime) -> Effect:
    """Call the model for the next step."""
    return CallModel(state.usage.iteration + 1, state.calls.attempt + 1)


def find_recheck_time(state: State, now: datetime, *, is_refused: bool) -> datetime | None:
    """Return when to check again for a lost action entry or a lost wake-up of a call."""
    if not (state.tools.pending or is_refused or is_deferred(state)):
        return None
    again = now + (ASK_AGAIN_AFTER if state.tools.pending else ACQUIRE_AGAIN_AFTER)
    return again if state.usage.deadline is None else min(again, state.usage.deadline)


MODEL_CALLS = Concern(
    "calls",
    {
        ModelReply: _after_reply,
        ModelCallFailed: _after_failure,
        ModelCallDeferred: _after_deferral,
        ModelCallAdmitted: _after_admission,
        AgentStateChangedObservation: _after_state_change,
        CondensationRequestAction: _after_condensation_request,
        InterruptedObservation: _after_interruption,
        LoopRecoveryAction: _after_recovery,
        MessageAction: _after_request,
        ChangeAgentStateAction: _after_request,
    },
)
