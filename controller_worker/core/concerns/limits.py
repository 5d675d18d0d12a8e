"""The limits of a conversation, and how they grow when a user continues it (OpenHands 4.3, 4.4).

The latest call of each kind is used to estimate the next one. A kind is a model and a service: the cost of a
condenser's summary does not predict the cost of a step, and one model does not predict another.

Holds: pure. A refused step consumes nothing. A limit grows only if the work ended in an error because of it and a user
continues. Estimates are a function of the log, and an implausible count changes them at most by the bounds below.
Differs: the budget is checked before a step counts, while the original also counts a refused step. Tokens and time are
limits too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from broker.contract import (
    AgentState,
    AgentStateChangedObservation,
    ConversationChanged,
    ConversationCreated,
    DelegateEnded,
    Event,
    ModelReply,
)
from controller_worker.core.announcement import announce
from controller_worker.core.concern import Concern, evolve
from controller_worker.core.effects import Effect

if TYPE_CHECKING:
    from controller_worker.core.state import State


MAX_KINDS = 16
"""Number of remembered kinds; the most recent ones are kept."""
SMALLEST_RATIO = 0.5
LARGEST_RATIO = 10.0
"""Our estimates are wrong by a factor of 0.6 to 1.6 for texts of users and programs. A provider's addition to a short
prompt, or an unknown tokenizer, can make the factor larger.
"""


@dataclass(frozen=True, slots=True)
class LatestCall:
    """The latest reply of one kind, and the longest.

    Attributes:
        service: the purpose of the call; see `ModelReply`.
        model: the name in the workers' settings; empty if it was not recorded.
        cost_usd: 0 if unknown.
        prompt_tokens: the provider's count.
        estimated_tokens: our estimate for the same prompt; 0 if there was none.
    """

    service: str
    model: str = ""
    cost_usd: float = 0.0
    longest_reply_tokens: int = 0
    prompt_tokens: int = 0
    estimated_tokens: int = 0

    @property
    def ratio(self) -> float | None:
        """Counted tokens per estimated token; None without an estimate."""
        return compute_ratio(self.prompt_tokens, self.estimated_tokens) if self.estimated_tokens > 0 else None


def compute_ratio(prompt_tokens: int, estimated_tokens: int) -> float:
    """Return counted tokens per estimated token, within the bounds."""
    thousandths = max(prompt_tokens, 0) * 1_000 // max(estimated_tokens, 1)  # a fraction of any size would overflow
    return min(max(thousandths, round(SMALLEST_RATIO * 1_000)), round(LARGEST_RATIO * 1_000)) / 1_000


def correct_estimate(estimated_tokens: int, ratio: float) -> int:
    """Return the expected number of tokens of a prompt."""
    return math.ceil(estimated_tokens * ratio)


def add_call(calls: tuple[LatestCall, ...], reply: ModelReply) -> tuple[LatestCall, ...]:
    """Return the latest calls with the next reply added at the end."""
    estimate = reply.estimate
    model = estimate.model if estimate is not None else ""
    service, usage = reply.service, reply.usage
    longest, others = usage.completion_tokens, []
    for call in calls:
        if call.service == service and call.model == model:
            longest = max(longest, call.longest_reply_tokens)
        else:
            others.append(call)
    estimated = estimate.prompt_tokens if estimate is not None else 0
    latest = LatestCall(service, model, reply.cost_usd or 0.0, longest, usage.prompt_tokens, estimated)
    return (*others, latest)[-MAX_KINDS:]


def find_latest_call(calls: tuple[LatestCall, ...], service: str, model: str | None) -> LatestCall | None:
    """Return the latest call of a kind, or of the service without a recorded model; None if there was none.

    Args:
        model: None if unknown; a call to any model then counts.
    """
    return next(
        (call for call in reversed(calls) if call.service == service and (model is None or call.model in (model, ""))),
        None,
    )


_RESTS_MEANWHILE = frozenset({AgentState.RATE_LIMITED, AgentState.USER_CONFIRMED})

REACHED = "RuntimeError: Agent reached maximum "
BUDGET_CODE = "max_budget"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the next step is refused.

    Attributes:
        code: `max_iterations`, `max_budget`, `max_tokens` or `max_time`.
        text: OpenHands' wording.
    """

    code: str
    text: str


@dataclass(frozen=True)
class ConversationUsage:
    """The usage of a conversation, including its ended delegates, and its limits.

    Attributes:
        iteration: model replies so far; those of delegates are counted in `delegation`.
        has_unknown_cost: some reply had no known price; `cost_usd` is then a lower bound.
        latest: the latest reply of each kind of call.
        inherited_usd: the cost before a fork, paid by its origin.
        deadline: the end of the allowed time.
        forked: the time of the fork. The time of older events, shared with its origin, does not count.
        is_changed: a user has set the limits after the work ended in an error, so they do not grow again.
    """

    iteration: int = 0
    max_iterations: int = 0
    max_budget_usd: float | None = None
    max_tokens: int | None = None
    deadline: datetime | None = None
    cost_usd: float = 0.0
    has_unknown_cost: bool = False
    latest: tuple[LatestCall, ...] = ()
    inherited_usd: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_changed: bool = False
    forked: datetime | None = None


def _after_event(usage: ConversationUsage, event: Event, state: State) -> ConversationUsage:
    """Record the inherited cost of a fork at its first own event."""
    if 0 < state.version == state.setup.forked_at:
        return evolve(usage, inherited_usd=usage.cost_usd - state.delegation.spent_usd)
    return usage


def _after_creation(usage: ConversationUsage, created: ConversationCreated, state: State) -> ConversationUsage:
    limits = created.limits
    if created.id > 1:
        return _after_event(usage, created, state)
    return ConversationUsage(
        max_iterations=limits.max_iterations,
        max_budget_usd=limits.max_budget_usd,
        max_tokens=limits.max_tokens,
        forked=created.timestamp if created.forked_at else None,
    )


def _after_reply(usage: ConversationUsage, reply: ModelReply, state: State) -> ConversationUsage:
    usage = _after_event(usage, reply, state)
    return evolve(
        usage,
        iteration=usage.iteration + (reply.service == "agent"),
        latest=add_call(usage.latest, reply),
        cost_usd=usage.cost_usd + (reply.cost_usd or 0.0),
        has_unknown_cost=usage.has_unknown_cost or reply.cost_usd is None,
        prompt_tokens=usage.prompt_tokens + reply.usage.prompt_tokens,
        completion_tokens=usage.completion_tokens + reply.usage.completion_tokens,
    )


def _after_delegate(usage: ConversationUsage, ended: DelegateEnded, state: State) -> ConversationUsage:
    usage = _after_event(usage, ended, state)
    if not any(delegate.id == ended.delegate_id for delegate in state.delegation.delegates):
        return usage
    return evolve(
        usage,
        cost_usd=usage.cost_usd + ended.cost_usd,
        has_unknown_cost=usage.has_unknown_cost or ended.has_unknown_cost,
        prompt_tokens=usage.prompt_tokens + ended.prompt_tokens,
        completion_tokens=usage.completion_tokens + ended.completion_tokens,
    )


def _after_limits(usage: ConversationUsage, change: ConversationChanged, state: State) -> ConversationUsage:
    """Set new limits. If time is being counted, restart the count."""
    usage = _after_event(usage, change, state)
    if change.limits is None:
        return usage
    limits = change.limits
    deadline = None
    is_counting = state.lifecycle.agent_state is AgentState.RUNNING or state.lifecycle.agent_state in _RESTS_MEANWHILE
    if limits.max_seconds is not None and is_counting and change.timestamp is not None:
        deadline = _find_time_start(usage, change.timestamp) + timedelta(seconds=limits.max_seconds)
    return evolve(
        usage,
        max_iterations=limits.max_iterations,
        max_budget_usd=limits.max_budget_usd,
        max_tokens=limits.max_tokens,
        deadline=deadline,
        is_changed=state.lifecycle.agent_state is AgentState.ERROR,
    )


def _find_time_start(usage: ConversationUsage, at: datetime) -> datetime:
    """Return the start of the counted time: the given moment, or the time of the fork if that is later."""
    return at if usage.forked is None else max(at, usage.forked)


def find_reached_limit(state: State) -> Refusal | None:
    """Return why the next step would exceed a limit, or None."""
    steps = count_steps(state)
    if _is_used_up(steps, state.usage.max_iterations):
        text = f"iteration. Current iteration: {steps}, max iteration: {state.usage.max_iterations}"
        return Refusal("max_iterations", REACHED + text)
    return find_reached_cost_limit(state)


def find_reached_cost_limit(state: State) -> Refusal | None:
    """Return why no further model call is allowed, for a step or another purpose; None if it is allowed."""
    if state.usage.max_budget_usd is not None and state.usage.cost_usd >= state.usage.max_budget_usd:
        return Refusal(BUDGET_CODE, render_budget_text(state))
    if _is_used_up(count_tokens(state), state.usage.max_tokens):
        tokens = f"Current tokens: {count_tokens(state)}, max tokens: {state.usage.max_tokens}"
        return Refusal("max_tokens", f"{REACHED}number of tokens for conversation. {tokens}")
    return None


def render_budget_text(state: State) -> str:
    """Return the error text for a used-up budget, in OpenHands' words."""
    budget = f"Current budget: {state.usage.cost_usd:.2f}, max budget: {state.usage.max_budget_usd or 0:.2f}"
    return f"{REACHED}budget for conversation. {budget}"


def find_reached_time_limit(state: State, now: datetime) -> Refusal | None:
    """Return why the work must end now, even with a call in flight; None while there is time."""
    if state.usage.deadline is None or now < state.usage.deadline:
        return None
    return Refusal("max_time", f"{REACHED}time for conversation. Max seconds: {state.setup.limits.max_seconds:g}")


def count_steps(state: State) -> int:
    """Return the iterations counted against the limit: its own, and those of ended delegates."""
    return state.usage.iteration + state.delegation.iterations


def count_tokens(state: State) -> int:
    """Return the tokens of all model calls, in and out."""
    return state.usage.prompt_tokens + state.usage.completion_tokens


def _after_state_change(
    usage: ConversationUsage, change: AgentStateChangedObservation, state: State
) -> ConversationUsage:
    """When work starts or resumes, restart the clock and raise each limit that was reached."""
    usage = _after_event(usage, change, state)
    if change.agent_state is not AgentState.RUNNING:
        return usage
    was = state.lifecycle.agent_state
    limits = state.setup.limits
    if limits.max_seconds is not None and was not in _RESTS_MEANWHILE and change.timestamp is not None:
        deadline = _find_time_start(usage, change.timestamp) + timedelta(seconds=limits.max_seconds)
        usage = evolve(usage, deadline=deadline)
    is_changed = usage.is_changed
    usage = evolve(usage, is_changed=False) if is_changed else usage
    if was is not AgentState.ERROR or is_changed:
        return usage
    if not state.setup.headless and _is_used_up(count_steps(state), usage.max_iterations):
        usage = evolve(usage, max_iterations=usage.max_iterations + limits.max_iterations)
    # Less than the budget may be spent, because the next call would have cost more than the rest.
    is_spent = state.lifecycle.error_code == BUDGET_CODE or _is_used_up(usage.cost_usd, usage.max_budget_usd)
    if limits.max_budget_usd is not None and is_spent:
        usage = evolve(usage, max_budget_usd=usage.cost_usd + limits.max_budget_usd)
    if limits.max_tokens is not None and _is_used_up(count_tokens(state), usage.max_tokens):
        usage = evolve(usage, max_tokens=count_tokens(state) + limits.max_tokens)
    return usage


def stop_in_time(state: State, now: datetime) -> Effect | None:
    """End the work when its time is up, even with a call in flight."""
    if state.lifecycle.agent_state not in (AgentState.RUNNING, AgentState.RATE_LIMITED, AgentState.USER_CONFIRMED):
        return None
    return _refuse(state, find_reached_time_limit(state, now))


def refuse_step(state: State, now: datetime) -> Effect | None:
    """End the work if its next step would exceed a limit."""
    return _refuse(state, find_reached_limit(state))


def _refuse(state: State, refusal: Refusal | None) -> Effect | None:
    return None if refusal is None else announce(state, AgentState.ERROR, refusal.text, code=refusal.code)


def _is_used_up(used: float, maximum: float | None) -> bool:
    return maximum is not None and used >= maximum


USAGE = Concern(
    "usage",
    {
        ConversationCreated: _after_creation,
        ConversationChanged: _after_limits,
        ModelReply: _after_reply,
        DelegateEnded: _after_delegate,
        AgentStateChangedObservation: _after_state_change,
        Event: _after_event,
    },
)
