"""Failed model calls as part of the core: what a failure leaves behind, and the wait before the next attempt.

Holds: no wait is longer than the conversation's own time.
Does not: choose the moment of the next attempt; the call's event names it (`llm.retry`).
"""

from __future__ import annotations

from datetime import datetime

from broker.events import ModelCallFailed
from controller_worker.condensation import after_overflow, is_overflow
from controller_worker.effects import Park
from controller_worker.failures import failure_of
from controller_worker.state import State, Wait, replace


def after_failure(state: State, failure: ModelCallFailed) -> State:
    """Return the state after a call that brought no reply."""
    if is_overflow(state, failure):
        return after_overflow(state)
    state = replace(state, gate=None, attempt=failure.attempt, last_error=failure.last_error, error_code=failure.code)
    if failure.retry_at is None:
        return replace(state, attempt=0, wait=None, ending=failure_of(failure.code).ended)
    return replace(state, wait=Wait(failure.code, failure.retry_at))


def wait_for_retry(state: State, now: datetime) -> Park | None:
    """Return the wait before the next attempt; None when it is over, or there is none."""
    if state.wait is not None and now < state.wait.until:
        until = state.wait.until if state.deadline is None else min(state.wait.until, state.deadline)
        return Park(until, state.wait.reason)
    return None
