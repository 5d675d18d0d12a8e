"""Estimates whether a conversation's own budget has room for its next model call.

The estimate is the whole prompt at the uncached price, plus a reply as long as the longest so far. It is at least the
cost of the latest reply, because the price of some models is known only from their replies. Earlier replies count only
for calls of the same kind: same model, and same purpose (step, condenser or critic).

Holds: money reserved for delegates is not available. A call is not started if its estimate exceeds the available money.
Does not: know a price that no source states, or expect a reply longer than all earlier ones.
"""

from __future__ import annotations

from broker.contract import ModelCallFailed
from controller_worker.core import (
    BUDGET_CODE,
    Append,
    State,
    correct_estimate,
    find_latest_call,
    render_budget_text,
    sum_reserved_usd,
)
from controller_worker.model.permits.call_permit import find_priority, is_batched
from controller_worker.model.steps.call_task import NotStarted
from controller_worker.model.steps.pending_call import PendingCall, RestOfStart, StartOutcome
from controller_worker.providers import LLMConfig, MessageMemo, ModelRequest, estimate_cost_usd, estimate_prompt_tokens

EXPECTED_REPLY_TOKENS = 4_096
"""The minimum expected length of a reply, unless the model's limit is lower."""
ROUNDING_USD = 1e-9


async def check_own_budget(call: PendingCall, rest: RestOfStart) -> StartOutcome:
    """Refuse a call that exceeds the budget. Wait instead if a delegate may still release enough money."""
    state = call.state
    maximum = state.usage.max_budget_usd
    if maximum is not None and not call.is_paid:
        cost_usd = estimate_usd(
            state, call.config, call.question.request, call.permits.tokens, counted_ratio=call.counted_ratio
        )
        spent_usd = state.usage.cost_usd
        if spent_usd + cost_usd > maximum + ROUNDING_USD:
            return Append((_make_refusal(state, cost_usd),))
        if spent_usd + sum_reserved_usd(state) + cost_usd > maximum + ROUNDING_USD:
            return NotStarted()  # until a delegate ends and releases the rest of its budget
    return await rest(call)


def estimate_usd(
    state: State,
    config: LLMConfig | None,
    request: ModelRequest,
    sizes: MessageMemo[int],
    *,
    counted_ratio: float | None = None,
) -> float:
    """Return the estimated cost of a call.

    Args:
        config: the settings of the model; None if unknown.
        sizes: caches the token count of each message.
        counted_ratio: exact prompt size divided by the estimate, if the prompt was counted.
    """
    latest = find_latest_call(state.usage.latest, request.service, None if config is None else config.model)
    floor_usd = latest.cost_usd if latest is not None else 0.0
    if config is None:
        return floor_usd
    reply_tokens = max(EXPECTED_REPLY_TOKENS, latest.longest_reply_tokens if latest is not None else 0)
    ratio = counted_ratio or (latest.ratio if latest is not None else None) or 1.0
    tokens = correct_estimate(estimate_prompt_tokens(request, sizes), ratio)
    batched = is_batched(config, request, find_priority(state))
    return max(estimate_cost_usd(config, tokens, reply_tokens, is_batched=batched), floor_usd)


def compute_available_usd(state: State) -> float | None:
    """Return the money available for a call; None without a budget."""
    maximum = state.usage.max_budget_usd
    return None if maximum is None else maximum - state.usage.cost_usd - sum_reserved_usd(state)


def _make_refusal(state: State, cost_usd: float) -> ModelCallFailed:
    """Return the event to append in place of a call that exceeds the budget."""
    left = max((state.usage.max_budget_usd or 0.0) - state.usage.cost_usd, 0.0)
    return ModelCallFailed(
        code=BUDGET_CODE,
        content=f"The call would cost about ${cost_usd:.4f}, and ${left:.4f} of the budget are left.",
        last_error=f"{render_budget_text(state)}; the next call would cost about {cost_usd:.2f}",
    )
