"""Counts a prompt with the provider's endpoint if an estimate is not exact enough.

Holds: a step is counted at most once, and only if its settings ask for it and a decision depends on the number. If the
count fails or takes too long, the estimate is used. A count uses the quota of the model like a call.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from broker.contract import ModelCallFailed
from broker.limits import QuotaKey
from broker.runtime import DeckhandsError
from controller_worker.core import Append, compute_ratio, correct_estimate
from controller_worker.model.model_call import to_call_failure
from controller_worker.model.permits.call_permit import find_priority, is_batched, list_accounts_above, name_step
from controller_worker.model.steps.call_task import PromptCount
from controller_worker.model.steps.own_budget import compute_available_usd, estimate_usd
from controller_worker.model.steps.pending_call import PendingCall, RestOfStart, StartOutcome
from controller_worker.providers import (
    ContextWindowError,
    LLMConfig,
    count_prompt_tokens,
    estimate_prompt_tokens,
    find_max_input_tokens,
)

COUNT_LIMIT_SECONDS = 10.0
NEAR_WINDOW = 0.8
"""Above this share of the window, an estimate cannot decide whether a prompt fits."""
NEAR_BUDGET = 2.0
"""Within this factor of the available money, an estimated cost cannot decide whether a call fits."""

_log = logging.getLogger(__name__)


async def count_prompt(call: PendingCall, rest: RestOfStart) -> StartOutcome:
    """Count the prompt if its exact size matters. Refuse one that exceeds the model's window."""
    counted = call.task.counted
    if counted.step != name_step(call.wanted):
        counted = PromptCount()
    config = call.config
    if config is not None and not call.is_paid:
        if not counted.step and _is_worth_counting(call, config):
            await call.before_waiting()

            def keep(count: PromptCount) -> None:
                call.task.counted = count

            return call.task.prepare(partial(_count, call), keep)
        too_large = _find_overflow(call, config, counted)
        if too_large is not None:
            return Append((too_large,))
    call.counted_ratio = counted.ratio
    return await rest(call)


def _is_worth_counting(call: PendingCall, config: LLMConfig) -> bool:
    """Return whether the exact size of a prompt matters for its window, its budget or a first reservation."""
    state = call.state
    request = call.question.request
    if not config.count_tokens or is_batched(config, request, find_priority(state)):
        return False
    known = call.permit.ratio(state, config, request)
    expected = correct_estimate(estimate_prompt_tokens(request, call.permits.tokens), known or 1.0)
    window = find_max_input_tokens(config)
    if window is not None and expected >= NEAR_WINDOW * window:
        return True
    left = compute_available_usd(state)
    cost_usd = estimate_usd(state, config, request, call.permits.tokens)
    if left is not None and left / NEAR_BUDGET <= cost_usd <= left * NEAR_BUDGET:
        return True
    return known is None and bool(list_accounts_above(state))


async def _count(call: PendingCall) -> PromptCount:
    """Ask the provider for the size of a prompt. Raises only on cancellation."""
    step = name_step(call.wanted)
    llm = call.question.llm
    request = call.question.request

    async def ask(key: QuotaKey | None) -> int | None:
        async with call.models.use_client(llm, key=key) as (client, _), asyncio.timeout(COUNT_LIMIT_SECONDS):
            return await count_prompt_tokens(client, request)

    try:
        _, config = await call.models.get_client(llm)
        tokens = await call.permit.count_prompt(config, ask)
    except (DeckhandsError, TimeoutError) as error:
        _log.warning("conversation %s: cannot count the prompt: %s", request.conversation_id, error or "no answer")
        return PromptCount(step)
    except Exception:  # noqa: BLE001  (an outer edge: a library's count costs no conversation its step)
        _log.exception("conversation %s: cannot count the prompt", request.conversation_id)
        return PromptCount(step)
    if not tokens:
        return PromptCount(step)
    estimated = estimate_prompt_tokens(request, call.permits.tokens)
    call.permits.learn_prompt(config.model, estimated_tokens=estimated, prompt_tokens=tokens)
    return PromptCount(step, tokens, compute_ratio(tokens, estimated))


def _find_overflow(call: PendingCall, config: LLMConfig, counted: PromptCount) -> ModelCallFailed | None:
    """Return the failure of a call whose prompt is too long; None if it may fit, or if a fallback may accept it."""
    if counted.tokens is None:
        return None
    window = find_max_input_tokens(config)
    if window is None or counted.tokens <= window:
        return None
    if any(fallback.is_for(ContextWindowError.code) for fallback in config.fallbacks):
        return None  # the call fails, and the fallback is called
    error = ContextWindowError(f"The prompt has {counted.tokens:,} tokens; the limit of {config.model} is {window:,}.")
    return to_call_failure(error, call.question.request.conversation_id, attempt=call.wanted.attempt)
