"""How large a call will be, before it is made: estimates for quotas and budgets, from characters and prices.

Holds: a worst case is never below what the same tokens cost later.
Does not: count as providers do; what was really used is known after the call.
"""

from __future__ import annotations

import json

from controller_worker.llm.config import LLMConfig
from controller_worker.llm.llm import ModelRequest, Usage
from controller_worker.llm.messages import Message, TextPart
from controller_worker.llm.model_table import call_cost_usd, look_up

CHARS_PER_TOKEN = 3
"""Fewer than in English prose: prompts of agents are code, paths and JSON."""
TOKENS_PER_IMAGE = 1_600
TOKENS_PER_MESSAGE = 8
UNKNOWN_OUTPUT_TOKENS = 8_192


def prompt_tokens(request: ModelRequest) -> int:
    """Return about how many tokens a prompt has, tools included; rather too many."""
    chars = sum(len(tool.name) + len(tool.description) + len(json.dumps(tool.parameters)) for tool in request.tools)
    return chars // CHARS_PER_TOKEN + sum(_tokens(message) for message in request.messages)


def worst_cost_usd(config: LLMConfig, input_tokens: int, *, is_batched: bool = False) -> float:
    """Return what a call costs at most, or 0 when the price is not known."""
    row = look_up(config.model)
    output_tokens = config.max_output_tokens or (row.max_output_tokens if row is not None else None)
    # Writing a prompt into the provider's cache is the dearest way to send it.
    usage = Usage(input_tokens, output_tokens or UNKNOWN_OUTPUT_TOKENS, cache_write_tokens=input_tokens)
    return call_cost_usd(config, row, usage, is_batched=is_batched) or 0.0


def _tokens(message: Message) -> int:
    chars = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    images = 0
    for part in message.content:
        if isinstance(part, TextPart):
            chars += len(part.text)
        else:
            images += 1
    thought = sum(len(str(block.get("thinking", ""))) for block in message.thinking_blocks)
    return (chars + thought) // CHARS_PER_TOKEN + images * TOKENS_PER_IMAGE + TOKENS_PER_MESSAGE
