"""When a prompt does not fit the model: condense and go on (OpenHands 1.8.8), as part of the core.

Holds: every conversation gets out of it: after `MAX_OVERFLOWS` prompts in a row that did not fit, it ends in an error.
Differs: a condensation takes no iteration, because nothing of the task is done by it.
"""

from __future__ import annotations

from broker.events import ModelCallFailed
from broker.specs import handles_requests
from controller_worker.acceptance import wants_verdict
from controller_worker.llm.errors import ContextWindowError
from controller_worker.state import State, replace

MAX_OVERFLOWS = 5


def is_overflow(state: State, failure: ModelCallFailed) -> bool:
    """Say whether a prompt did not fit and less of the history can be tried."""
    if failure.code != ContextWindowError.code:
        return False
    if wants_verdict(state):
        return state.overflows < MAX_OVERFLOWS
    return (
        state.agent.enable_history_truncation
        and handles_requests(state.agent.condenser)
        and state.overflows < MAX_OVERFLOWS
    )


def after_overflow(state: State) -> State:
    """Note that a condensation is to be asked for; a critic, whose question is not the View, is asked a shorter one."""
    is_condensed = not wants_verdict(state)
    state = replace(state, gate=None, attempt=0, wait=None, overflows=state.overflows + 1)
    return replace(state, wants_condensation=True) if is_condensed else state
