"""Waiting for a quota, a budget or a batch, as part of the core: what it is in the log, and what is wanted meanwhile.

Such a wait ends when the governor, the ledger or the provider says so and not at a time, so the core goes on wanting
the call; the shell (`call_gate`) asks whenever the conversation is woken.

Holds: a wait for a quota shows as `rate_limited`, which OpenHands has; one for a budget as the wait reason
`waiting_for_budget`, and one for a batch as `batch`, of a running conversation: OpenHands has no state for them.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from broker.agent_state import AgentState
from broker.events import ModelCallDeferred
from controller_worker.announcement import announce
from controller_worker.effects import CallModel, Effect
from controller_worker.state import Gate, State, replace

QUOTA = "rate_limit"
BUDGET = "waiting_for_budget"
BATCH = "batch"

ASK_AGAIN_AFTER = timedelta(minutes=1)
KNOCK_AGAIN_AFTER = timedelta(minutes=5)

_SHOWN = {QUOTA: AgentState.RATE_LIMITED, BUDGET: AgentState.RUNNING}


def after_deferral(state: State, deferral: ModelCallDeferred) -> State:
    """Note that the call has to wait."""
    return replace(state, gate=Gate(deferral.code, deferral.expected_at))


def is_at_gate(state: State) -> bool:
    """Say whether a call waits for its quota or its budget."""
    return state.gate is not None and state.agent_state in (AgentState.RUNNING, AgentState.RATE_LIMITED)


def at_gate(state: State) -> Effect:
    """Say what is wanted meanwhile: to show the wait, then the call."""
    assert state.gate is not None
    shown = _SHOWN.get(state.gate.reason, AgentState.RUNNING)
    if shown is not state.agent_state:
        return announce(state, shown)
    return CallModel(state.iteration + 1, state.attempt + 1)


def asks_again_at(state: State, now: datetime, *, is_shut: bool) -> datetime | None:
    """Say when somebody has to ask again for an action whose entry is lost, or for a call whose wake is."""
    if not (state.pending or is_shut or is_at_gate(state)):
        return None
    again = now + (ASK_AGAIN_AFTER if state.pending else KNOCK_AGAIN_AFTER)
    return again if state.deadline is None else min(again, state.deadline)
