"""What a conversation may use up, and how that grows when a person goes on with it (OpenHands 4.3, 4.4).

Holds: pure; a refused step consumes nothing; a limit grows only when it was reached, work ended in an error because of
it, and somebody goes on.
Differs: the budget is looked at before a step counts, because the original has counted a step that it then refuses;
tokens and time are limits too.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from broker.agent_state import AgentState
from broker.events import Limits
from broker.observations import AgentStateChangedObservation
from controller_worker.state import State, replace

_RESTS_MEANWHILE = frozenset({AgentState.RATE_LIMITED, AgentState.USER_CONFIRMED})

REACHED = "RuntimeError: Agent reached maximum "


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no further step.

    Attributes:
        code: `max_iterations`, `max_budget`, `max_tokens` or `max_time`.
        text: as OpenHands words it.
    """

    code: str
    text: str


def with_limits(state: State, limits: Limits) -> State:
    """Return the state of a conversation that begins with these limits."""
    return replace(
        state,
        limits=limits,
        max_iterations=limits.max_iterations,
        max_budget_usd=limits.max_budget_usd,
        max_tokens=limits.max_tokens,
    )


def limit_reached(state: State) -> Refusal | None:
    """Return why the next step would pass a limit, None if it would not."""
    steps = steps_used(state)
    if _is_used_up(steps, state.max_iterations):
        text = f"iteration. Current iteration: {steps}, max iteration: {state.max_iterations}"
        return Refusal("max_iterations", REACHED + text)
    return cost_limit_reached(state)


def cost_limit_reached(state: State) -> Refusal | None:
    """Return why no further model call may be made, be it a step or not; None if one may."""
    if state.max_budget_usd is not None and state.cost_usd >= state.max_budget_usd:
        budget = f"Current budget: {state.cost_usd:.2f}, max budget: {state.max_budget_usd:.2f}"
        return Refusal("max_budget", f"{REACHED}budget for conversation. {budget}")
    if _is_used_up(tokens_used(state), state.max_tokens):
        tokens = f"Current tokens: {tokens_used(state)}, max tokens: {state.max_tokens}"
        return Refusal("max_tokens", f"{REACHED}number of tokens for conversation. {tokens}")
    return None


def is_out_of_time(state: State, now: datetime) -> Refusal | None:
    """Return why work ends now, whatever is under way; None while there is time."""
    if state.deadline is None or now < state.deadline:
        return None
    return Refusal("max_time", f"{REACHED}time for conversation. Max seconds: {state.limits.max_seconds:g}")


def steps_used(state: State) -> int:
    """Return the iterations that count against the limit: its own, and those of delegates that have ended."""
    return state.iteration + state.delegated_iterations


def tokens_used(state: State) -> int:
    """Return the tokens of all model calls, in and out."""
    return state.prompt_tokens + state.completion_tokens


def after_start(state: State, was: AgentState, change: AgentStateChangedObservation) -> State:
    """Return the state after work has begun or goes on: the time runs anew, and limits that were hit have grown."""
    limits = state.limits
    if limits.max_seconds is not None and was not in _RESTS_MEANWHILE and change.timestamp is not None:
        state = replace(state, deadline=change.timestamp + timedelta(seconds=limits.max_seconds))
    if was is not AgentState.ERROR:
        return state
    if not state.headless and _is_used_up(steps_used(state), state.max_iterations):
        state = replace(state, max_iterations=state.max_iterations + limits.max_iterations)
    if limits.max_budget_usd is not None and _is_used_up(state.cost_usd, state.max_budget_usd):
        state = replace(state, max_budget_usd=state.cost_usd + limits.max_budget_usd)
    if limits.max_tokens is not None and _is_used_up(tokens_used(state), state.max_tokens):
        state = replace(state, max_tokens=tokens_used(state) + limits.max_tokens)
    return replace(state, last_error="", error_code="", attempt=0, wait=None)


def _is_used_up(used: float, maximum: float | None) -> bool:
    return maximum is not None and used >= maximum
