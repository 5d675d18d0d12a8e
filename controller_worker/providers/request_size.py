"""Estimates the size and cost of a call before it is made, for quotas and budgets.

Holds: a maximum cost is never below the later cost of the same number of tokens.
Does not: count exactly; the real usage is known after the call.
"""

from __future__ import annotations

import json
import math
import string
from functools import lru_cache

from broker.contract import ToolSpec
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.llm import CallUsage, ModelRequest
from controller_worker.providers.messages.message_memo import MessageMemo
from controller_worker.providers.messages.messages import Message, TextPart
from controller_worker.providers.model_table import CallPricing, ModelRow, compute_call_cost_usd, look_up

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
