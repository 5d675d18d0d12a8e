"""Counting a prompt by the provider's own endpoint, where an estimate would not do.

Holds: a step is counted once at most, and only where its settings ask for it and something depends on the number; a
count that fails, or takes too long, leaves the estimate; a count goes through the quota of the model like a call.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from broker.contract.events import LLMSpec, ModelCallFailed
from broker.runtime.errors import DeckhandsError
from controller_worker.core.latest_calls import corrected, ratio_of
from controller_worker.core.state import State
from controller_worker.model.model_call import failed_by
from controller_worker.model.models import Models
from controller_worker.model.permits.batched_call import is_batched
from controller_worker.model.permits.budget_reservation import accounts_above
from controller_worker.model.permits.call_permit import CallPermit, priority_of
from controller_worker.model.permits.own_budget import estimate_usd, left_usd
from controller_worker.model.permits.permits import Permits
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import ContextWindowError
from controller_worker.providers.llm import ModelRequest, counted_tokens
from controller_worker.providers.model_table import max_input_tokens
from controller_worker.providers.request_size import prompt_tokens

COUNT_LIMIT_SECONDS = 10.0
NEAR_WINDOW = 0.8
"""From this share of the window on, an estimate may be wrong about whether a prompt fits."""
NEAR_BUDGET = 2.0
"""How many times more or less than what is left an estimated cost may be wrong about whether it fits."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptCount:
    """What counting the prompt of one step has brought.

    Attributes:
        step: see `step_of`; empty for none.
        tokens: None where it was not counted.
        ratio: how many tokens there are for each that was estimated.
    """

    step: str = ""
    tokens: int | None = None
    ratio: float | None = None


def is_worth_counting(
    state: State, config: LLMConfig, request: ModelRequest, permit: CallPermit, permits: Permits
) -> bool:
    """Say whether something depends on the exact size of a prompt: its window, its budget, or a first reservation."""
    if not config.count_tokens or is_batched(config, request, priority_of(state)):
        return False
    known = permit.ratio(state, config, request)
    expected, window = corrected(prompt_tokens(request, permits.tokens), known or 1.0), max_input_tokens(config)
    if window is not None and expected >= NEAR_WINDOW * window:
        return True
    left, cost_usd = left_usd(state), estimate_usd(state, config, request, permits.tokens)
    if left is not None and left / NEAR_BUDGET <= cost_usd <= left * NEAR_BUDGET:
        return True
    return known is None and bool(accounts_above(state))


async def count(
    step: str, models: Models, llm: LLMSpec, request: ModelRequest, *, permit: CallPermit, permits: Permits
) -> PromptCount:
    """Ask the provider how large a prompt is; never raises but when it is cancelled."""

    async def ask(key_env: str | None) -> int | None:
        async with models.using(llm, key_env=key_env) as (client, _), asyncio.timeout(COUNT_LIMIT_SECONDS):
            return await counted_tokens(client, request)

    try:
        _, config = await models.of(llm)
        tokens = await permit.counted(config, ask)
    except (DeckhandsError, TimeoutError) as error:
        _log.warning("conversation %s: the prompt is not counted: %s", request.conversation_id, error or "no answer")
        return PromptCount(step)
    except Exception:  # noqa: BLE001  (an outer edge: a library's count costs no conversation its step)
        _log.exception("conversation %s: the prompt is not counted", request.conversation_id)
        return PromptCount(step)
    if not tokens:
        return PromptCount(step)
    estimated = prompt_tokens(request, permits.tokens)
    permits.learn_prompt(config.model, estimated_tokens=estimated, prompt_tokens=tokens)
    return PromptCount(step, tokens, ratio_of(tokens, estimated))


def overflow(counted: PromptCount, config: LLMConfig, request: ModelRequest, *, attempt: int) -> ModelCallFailed | None:
    """Return what the log says in place of a call whose prompt does not fit; None where it may, or another may."""
    if counted.tokens is None:
        return None
    window = max_input_tokens(config)
    if window is None or counted.tokens <= window:
        return None
    if any(fallback.is_for(ContextWindowError.code) for fallback in config.fallbacks):
        return None  # the call fails, and the fallback is asked
    error = ContextWindowError(f"The prompt has {counted.tokens:,} tokens, and {config.model} takes {window:,}.")
    return failed_by(error, request.conversation_id, attempt=attempt)
