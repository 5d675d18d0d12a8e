"""The usage of a call: as the provider reports it, unless the report is implausible.

Budgets and quotas count the reported usage. A report of nothing, zero, negative or billions of tokens would make them
useless. Our own estimate replaces such a value.

Holds: a plausible figure stays as reported. A prompt in the provider's cache is cheap, not short.
Does not: notice an error of less than a factor of ten, which only the provider's tokenizer could detect.
"""

from __future__ import annotations

from dataclasses import replace

from controller_worker.providers.config import LLMConfig
from controller_worker.providers.llm import Completion, ModelRequest, Usage
from controller_worker.providers.model_table import ModelRow, Sale, call_cost_usd
from controller_worker.providers.request_size import prompt_tokens, text_tokens
from controller_worker.providers.wires.reply import Reply

FACTOR = 10
"""Up to this factor, a deviation from the estimate is plausible: repetitions make few tokens, rare scripts many."""
BYTES_PER_TOKEN = 4 * FACTOR
"""Below this number of bytes per token, the count is plausible. Images have more."""
UNKNOWN_INPUT_LIMIT = 10_000_000
UNKNOWN_OUTPUT_LIMIT = 1_000_000
SLACK = 2
"""Up to this multiple of the model's limit, a count is plausible: tables become outdated."""


def completion_of(
    reply: Reply,
    request: ModelRequest,
    config: LLMConfig,
    row: ModelRow | None,
    *,
    latency_seconds: float,
    sent_bytes: int | None = None,
    reported_usd: float | None = None,
    quota_left: dict[str, int] | None = None,
) -> Completion:
    """Return a reply with its usage and its cost.

    Args:
        sent_bytes: the size of the request; None if unknown.
        reported_usd: the cost reported by a gateway; None without one.
    """
    usage = plausible_usage(reply, request, config, row, sent_bytes=sent_bytes)
    sold = Sale(request.carry is not None, reply.service_tier, config.cache_lifetime == "1h")
    own_usd = call_cost_usd(config, row, usage, sold)
    reported_usd = reply.told_usd if reported_usd is None else reported_usd
    return replace(reply, usage=usage).completion(
        cost_usd=_plausible_usd(reported_usd, own_usd),
        latency_seconds=latency_seconds,
        quota_left=quota_left,
        is_usage_estimated=usage != _with_cache(reply.usage),
    )


def plausible_usage(
    reply: Reply, request: ModelRequest, config: LLMConfig, row: ModelRow | None, *, sent_bytes: int | None = None
) -> Usage:
    """Return the reported usage, with estimates in place of implausible values."""
    usage = found = _with_cache(reply.usage)
    prompt = usage.prompt_tokens
    limit = SLACK * ((row and row.max_input_tokens) or UNKNOWN_INPUT_LIMIT)
    is_plain = sent_bytes is not None and prompt * BYTES_PER_TOKEN >= sent_bytes
    if prompt > limit or not is_plain:
        estimate = prompt_tokens(request)
        # The provider does not count the parts of the prompt that it dropped or summarized.
        is_short = prompt == 0 if config.context_management is not None else prompt * FACTOR < estimate
        if prompt > limit or is_short:
            found = Usage(prompt_tokens=estimate, completion_tokens=usage.completion_tokens)
    asked = max(config.max_output_tokens or 0, (row and row.max_output_tokens) or 0)
    written = sum(map(text_tokens, _written(reply)))
    if not written <= usage.completion_tokens * FACTOR <= SLACK * FACTOR * (asked or UNKNOWN_OUTPUT_LIMIT):
        found = replace(found, completion_tokens=written)
    return found


def _with_cache(usage: Usage) -> Usage:
    """Add cached tokens to the prompt tokens, if the provider counts them separately."""
    cached = usage.cache_read_tokens + usage.cache_write_tokens
    return usage if cached <= usage.prompt_tokens else replace(usage, prompt_tokens=usage.prompt_tokens + cached)


def _plausible_usd(reported_usd: float | None, own_usd: float | None) -> float | None:
    """Return the gateway's cost; our own estimate if the two are far apart."""
    if reported_usd is None or own_usd is None:
        return own_usd if reported_usd is None else reported_usd
    return reported_usd if own_usd / FACTOR <= reported_usd <= own_usd * FACTOR else own_usd


def _written(reply: Reply) -> list[str]:
    thoughts = [str(block.get("thinking", "")) for block in reply.thinking_blocks]
    calls = [f"{call.name} {call.arguments}" for call in reply.tool_calls]
    return [reply.text, *calls, *thoughts]
