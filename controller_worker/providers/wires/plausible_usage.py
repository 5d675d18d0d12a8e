"""What a call has used: as the provider says, unless no call can have used that.

Budgets and quotas count what providers report. One that reports nothing, zero, less than nothing or the odd billion
would make them useless, so there our own estimate counts.

Holds: a figure that is plausible stays as it was reported; a prompt that the provider had in its cache is cheap, not
short.
Does not: notice a count that is wrong by less than ten times; nobody could without the provider's tokenizer.
"""

from __future__ import annotations

from dataclasses import replace

from controller_worker.providers.config import LLMConfig
from controller_worker.providers.llm import Completion, ModelRequest, Usage
from controller_worker.providers.messages.messages import ToolCall
from controller_worker.providers.model_table import ModelRow, Sale, call_cost_usd
from controller_worker.providers.request_size import prompt_tokens, text_tokens
from controller_worker.providers.wires.reply import Reply

FACTOR = 10
"""How many times more or less than the estimate is still plausible: repetitions make few tokens, odd scripts many."""
BYTES_PER_TOKEN = 4 * FACTOR
"""A prompt with fewer bytes a token than this needs no closer look; images have more."""
UNKNOWN_INPUT_LIMIT = 10_000_000
UNKNOWN_OUTPUT_LIMIT = 1_000_000
SLACK = 2
"""How many times the limit of a model its counts may be: tables grow old."""


def completion_of(
    reply: Reply,
    request: ModelRequest,
    config: LLMConfig,
    row: ModelRow | None,
    *,
    latency_seconds: float,
    sent_bytes: int | None = None,
    told_usd: float | None = None,
    quota_left: dict[str, int] | None = None,
) -> Completion:
    """Return a reply with what it used and what it cost.

    Args:
        sent_bytes: of the request; None if they are not known.
        told_usd: what a gateway says that it cost; None if it does not say.
    """
    usage = plausible_usage(reply, request, config, row, sent_bytes=sent_bytes)
    sold = Sale(request.carry is not None, reply.service_tier, config.cache_lifetime == "1h")
    own_usd = call_cost_usd(config, row, usage, sold)
    told_usd = reply.told_usd if told_usd is None else told_usd
    return replace(reply, usage=usage).completion(
        cost_usd=_plausible_usd(told_usd, own_usd),
        latency_seconds=latency_seconds,
        quota_left=quota_left,
        is_usage_estimated=usage != _with_cache(reply.usage),
    )


def plausible_usage(
    reply: Reply, request: ModelRequest, config: LLMConfig, row: ModelRow | None, *, sent_bytes: int | None = None
) -> Usage:
    """Return what a provider has reported, with estimates in place of what cannot be."""
    usage = found = _with_cache(reply.usage)
    prompt = usage.prompt_tokens
    limit = SLACK * ((row and row.max_input_tokens) or UNKNOWN_INPUT_LIMIT)
    is_plain = sent_bytes is not None and prompt * BYTES_PER_TOKEN >= sent_bytes
    if prompt > limit or not is_plain:
        estimate = prompt_tokens(request)
        # What the provider leaves out or has summarised is not part of the prompt that it counts.
        is_short = prompt == 0 if config.context_management is not None else prompt * FACTOR < estimate
        if prompt > limit or is_short:
            found = Usage(prompt_tokens=estimate, completion_tokens=usage.completion_tokens)
    asked = max(config.max_output_tokens or 0, (row and row.max_output_tokens) or 0)
    written = sum(map(text_tokens, _written(reply)))
    if not written <= usage.completion_tokens * FACTOR <= SLACK * FACTOR * (asked or UNKNOWN_OUTPUT_LIMIT):
        found = replace(found, completion_tokens=written)
    return found


def _with_cache(usage: Usage) -> Usage:
    """Count what the provider had in its cache as a part of the prompt, where it counts it beside it."""
    cached = usage.cache_read_tokens + usage.cache_write_tokens
    return usage if cached <= usage.prompt_tokens else replace(usage, prompt_tokens=usage.prompt_tokens + cached)


def _plausible_usd(told_usd: float | None, own_usd: float | None) -> float | None:
    """Return what a gateway says, or our own price where the two have nothing to do with each other."""
    if told_usd is None or own_usd is None:
        return own_usd if told_usd is None else told_usd
    return told_usd if own_usd / FACTOR <= told_usd <= own_usd * FACTOR else own_usd


def _written(reply: Reply) -> list[str]:
    thoughts = [str(block.get("thinking", "")) for block in reply.thinking_blocks]
    return [reply.text, *map(_call_text, reply.tool_calls), *thoughts]


def _call_text(call: ToolCall) -> str:
    return f"{call.name} {call.arguments}"
