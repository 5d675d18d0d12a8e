"""Estimates the size and cost of a call before it is made, for quotas and budgets.

After the call, budgets and quotas count the usage reported by the provider, unless it is implausible. A missing, zero,
negative or absurdly high count would make them useless, so our own estimate replaces it.

Holds: a maximum cost is never below the later cost of the same number of tokens. A plausible figure stays as reported.
A cached prompt costs less, but its length counts in full.
Does not: count exactly; the real usage is known after the call; notice an error of less than a factor of ten, which
only the provider's tokenizer could detect.
"""

from __future__ import annotations

import json
import math
import string
from dataclasses import replace
from functools import lru_cache

from broker.contract import ToolSpec
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.llm import CallUsage, Completion, ModelRequest
from controller_worker.providers.messages.message_memo import MessageMemo
from controller_worker.providers.messages.messages import Message, TextPart
from controller_worker.providers.model_table import CallPricing, ModelRow, compute_call_cost_usd, look_up
from controller_worker.providers.wires.reply import ParsedReply

_LOWER, _UPPER, _DIGITS = (text.encode() for text in (string.ascii_lowercase, string.ascii_uppercase, string.digits))
_BREAKS, _BLANK, _ASCII = b"\n\r\t", b" ", bytes(range(128))
TOKENS_PER_BYTE = {
    "lower": 0.23,
    "upper": 0.5,
    "digit": 0.85,
    "blank": 0.08,
    "break": 0.45,
    "mark": 0.66,
    "other": 0.24,
}
"""Tokens per UTF-8 byte, by character class; docs/quotas.md lists the errors.

A tokenizer is exact, but takes 80 MB and half a second of CPU in each worker, and 15 times as long per text.
"""
TOKENS_PER_IMAGE = 1_600
TOKENS_PER_MESSAGE = 8
UNKNOWN_OUTPUT_TOKENS = 8_192


def estimate_prompt_tokens(request: ModelRequest, memo: MessageMemo[int] | None = None) -> int:
    """Return the estimated token count of a prompt, including tools.

    Args:
        memo: caches the count of each message; None counts all messages.
    """
    memo = MessageMemo() if memo is None else memo
    tools = sum(_tool_tokens(_SameTool(tool)) for tool in request.tools)
    return tools + sum(memo.of(message, _tokens) for message in request.messages)


class _SameTool:
    """A tool as a dict key, compared by identity, because a tool contains a dict and has no hash."""

    __slots__ = ("tool",)

    def __init__(self, tool: ToolSpec) -> None:
        self.tool = tool

    def __hash__(self) -> int:
        return id(self.tool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameTool) and self.tool is other.tool


@lru_cache(maxsize=256)
def _tool_tokens(same: _SameTool) -> int:
    tool = same.tool
    return estimate_text_tokens(f"{tool.name} {tool.description} {json.dumps(tool.parameters)}")


def estimate_text_tokens(text: str) -> int:
    """Return the estimated token count of a text; at least 1 if it is not empty."""
    content = text.encode("utf-8", "replace")

    def count(kind: bytes) -> int:
        return len(content) - len(content.translate(None, kind))

    counts = {"lower": count(_LOWER), "upper": count(_UPPER), "digit": count(_DIGITS)}
    counts |= {"blank": count(_BLANK), "break": count(_BREAKS), "other": len(content) - count(_ASCII)}
    counts["mark"] = len(content) - sum(counts.values())
    return math.ceil(sum(number * TOKENS_PER_BYTE[kind] for kind, number in counts.items()))


def estimate_max_cost_usd(config: LLMConfig, input_tokens: int, *, is_batched: bool = False) -> float:
    """Return the maximum cost of a call; 0 if the price is not known."""
    row = look_up(config.known_as)
    output_tokens = _find_longest_reply(config, row) or UNKNOWN_OUTPUT_TOKENS
    return _compute_max_usd(config, row, input_tokens, output_tokens, is_batched=is_batched)


def estimate_cost_usd(config: LLMConfig, input_tokens: int, output_tokens: int, *, is_batched: bool = False) -> float:
    """Return the maximum cost of a call with a reply of this length; 0 if the price is not known."""
    row = look_up(config.known_as)
    output_tokens = min(output_tokens, _find_longest_reply(config, row) or output_tokens)
    return _compute_max_usd(config, row, input_tokens, output_tokens, is_batched=is_batched)


def _find_longest_reply(config: LLMConfig, row: ModelRow | None) -> int | None:
    return config.max_output_tokens or (row.max_output_tokens if row is not None else None)


def _compute_max_usd(
    config: LLMConfig, row: ModelRow | None, input_tokens: int, output_tokens: int, *, is_batched: bool
) -> float:
    # Writing a prompt to the provider's cache is the most expensive way to send it.
    usage = CallUsage(input_tokens, output_tokens, cache_write_tokens=input_tokens)
    sold = CallPricing(is_batched, config.service_tier or "", config.cache_lifetime == "1h")
    return compute_call_cost_usd(config, row, usage, sold) or 0.0


def _tokens(message: Message) -> int:
    texts = [f"{call.name} {call.arguments}" for call in message.tool_calls]
    texts += [str(block.get("thinking", "")) for block in message.thinking_blocks]
    images = 0
    for part in message.content:
        if isinstance(part, TextPart):
            texts.append(part.text)
        else:
            images += 1
    return sum(map(estimate_text_tokens, texts)) + images * TOKENS_PER_IMAGE + TOKENS_PER_MESSAGE


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
    thoughts = [str(block.get("thinking", "")) for block in reply.thinking_blocks]
    calls = [f"{call.name} {call.arguments}" for call in reply.tool_calls]
    texts = [reply.text, *calls, *thoughts]
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
