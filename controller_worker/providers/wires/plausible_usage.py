"""The usage of a call: as the provider reports it, unless the report is implausible.

Budgets and quotas count the reported usage. A report of nothing, zero, negative or billions of tokens would make them
useless. Our own estimate replaces such a value.

Holds: a plausible figure stays as reported. A prompt in the provider's cache is cheap, not short.
Does not: notice an error of less than a factor of ten, which only the provider's tokenizer could detect.
"""

from __future__ import annotations

from dataclasses import replace

from controller_worker.providers.config import LLMConfig
from controller_worker.providers.llm import CallUsage, Completion, ModelRequest
from controller_worker.providers.messages.message_memo import MessageMemo
from controller_worker.providers.model_table import CallPricing, ModelRow, compute_call_cost_usd
from controller_worker.providers.request_size import estimate_prompt_tokens, estimate_text_tokens
from controller_worker.providers.wires.reply import ParsedReply

PLAUSIBLE_FACTOR = 10
"""Up to this factor, a deviation from the estimate is plausible: repetitions make few tokens, rare scripts many."""
BYTES_PER_TOKEN = 4 * PLAUSIBLE_FACTOR
"""Below this number of bytes per token, the count is plausible. Images have more."""
UNKNOWN_INPUT_LIMIT = 10_000_000
UNKNOWN_OUTPUT_LIMIT = 1_000_000
LIMIT_FACTOR = 2
"""Up to this multiple of the model's limit, a count is plausible: tables become outdated."""


def make_completion(
    reply: ParsedReply,
    request: ModelRequest,
    config: LLMConfig,
    row: ModelRow | None,
    *,
    latency_seconds: float,
    sent_bytes: int | None = None,
    tokens: MessageMemo[int] | None = None,
    reported_usd: float | None = None,
    quota_left: dict[str, int] | None = None,
) -> Completion:
    """Return a reply with its usage and its cost.

    Args:
        sent_bytes: the size of the request; None if unknown.
        tokens: caches the estimate of each message; None estimates all messages.
        reported_usd: the cost reported by a gateway; None without one.
    """
    usage = make_plausible_usage(reply, request, config, row, sent_bytes=sent_bytes, tokens=tokens)
    sold = CallPricing(request.carry is not None, reply.service_tier, config.cache_lifetime == "1h")
    own_usd = compute_call_cost_usd(config, row, usage, sold)
    reported_usd = reply.reported_usd if reported_usd is None else reported_usd
    return replace(reply, usage=usage).to_completion(
        cost_usd=_choose_usd(reported_usd, own_usd),
        latency_seconds=latency_seconds,
        quota_left=quota_left,
        is_usage_estimated=usage != _add_cached_tokens(reply.usage),
    )


def make_plausible_usage(
    reply: ParsedReply,
    request: ModelRequest,
    config: LLMConfig,
    row: ModelRow | None,
    *,
    sent_bytes: int | None = None,
    tokens: MessageMemo[int] | None = None,
) -> CallUsage:
    """Return the reported usage, with estimates in place of implausible values."""
    usage = found = _add_cached_tokens(reply.usage)
    prompt = usage.prompt_tokens
    limit = LIMIT_FACTOR * ((row and row.max_input_tokens) or UNKNOWN_INPUT_LIMIT)
    is_plain = sent_bytes is not None and prompt * BYTES_PER_TOKEN >= sent_bytes
    if prompt > limit or not is_plain:
        estimate = estimate_prompt_tokens(request, tokens)
        # The provider does not count the parts of the prompt that it dropped or summarized.
        is_short = prompt == 0 if config.context_management is not None else prompt * PLAUSIBLE_FACTOR < estimate
        if prompt > limit or is_short:
            found = CallUsage(prompt_tokens=estimate, completion_tokens=usage.completion_tokens)
    asked = max(config.max_output_tokens or 0, (row and row.max_output_tokens) or 0)
    most = LIMIT_FACTOR * PLAUSIBLE_FACTOR * (asked or UNKNOWN_OUTPUT_LIMIT)
    scaled = usage.completion_tokens * PLAUSIBLE_FACTOR
    texts = _list_written_texts(reply)
    # No text has more tokens than bytes, so a count above the bytes needs no estimate.
    if not len(texts) + sum(len(text) if text.isascii() else 4 * len(text) for text in texts) <= scaled <= most:
        written = sum(map(estimate_text_tokens, texts))
        if not written <= scaled <= most:
            found = replace(found, completion_tokens=written)
    return found


def _add_cached_tokens(usage: CallUsage) -> CallUsage:
    """Add cached tokens to the prompt tokens, if the provider counts them separately."""
    cached = usage.cache_read_tokens + usage.cache_write_tokens
    return usage if cached <= usage.prompt_tokens else replace(usage, prompt_tokens=usage.prompt_tokens + cached)


def _choose_usd(reported_usd: float | None, own_usd: float | None) -> float | None:
    """Return the gateway's cost; our own estimate if the two are far apart."""
    if reported_usd is None or own_usd is None:
        return own_usd if reported_usd is None else reported_usd
    return reported_usd if own_usd / PLAUSIBLE_FACTOR <= reported_usd <= own_usd * PLAUSIBLE_FACTOR else own_usd


def _list_written_texts(reply: ParsedReply) -> list[str]:
    thoughts = [str(block.get("thinking", "")) for block in reply.thinking_blocks]
    calls = [f"{call.name} {call.arguments}" for call in reply.tool_calls]
    return [reply.text, *calls, *thoughts]
