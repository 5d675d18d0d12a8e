"""Model replies as OpenHands records them: a copy of the provider's response in every resulting event.

Holds: tokens from the provider's cache are in the same field as in litellm. `to_reply_extension`, which only Deckhands
reads, has the data that a response cannot hold (requester, seen events, cost, latency, thinking).
Does not: trust a response: a missing or malformed part counts as empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from broker.contract import ModelReply, ModelToolCall, ToolCallMetadata

Fields = Mapping[str, Any]

TOKENS = ("prompt_tokens", "completion_tokens", "cache_read_tokens", "cache_write_tokens")
OWN_FIELDS = ("service", "cost_usd", "latency_seconds", "iteration", "thinking_blocks")
_MAX_TOKENS = 1 << 53


def to_response(reply: ModelReply) -> dict[str, Any]:
    """Return a reply in the form that litellm returns."""
    message = {
        "role": "assistant",
        "content": reply.content,
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ],
    }
    usage = reply.usage
    return {
        "id": reply.response_id or f"reply-{reply.id}",
        "model": reply.model,
        "choices": [{"index": 0, "finish_reason": reply.stop_reason, "message": message}],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cache_read_tokens},
            "cache_creation_input_tokens": usage.cache_write_tokens,
        },
    }


def make_unknown_response(call: ToolCallMetadata) -> dict[str, Any]:
    """Return a substitute for the response of a call whose reply is not in the log."""
    called = ModelToolCall(id=call.tool_call_id, name=call.function_name, arguments="{}")
    return to_response(ModelReply(id=call.reply_id, tool_calls=(called,), stop_reason="tool_calls"))


def to_reply_extension(reply: ModelReply, *, seen: int, has_response: bool) -> dict[str, Any]:
    """Return the data of a reply that the response does not contain.

    Args:
        seen: the last recorded event in its prompt; -1 for none.
        has_response: the recorded event has the response itself in another field.
    """
    wire = reply.wire()
    own = {name: wire[name] for name in OWN_FIELDS if wire.get(name) not in (None, [], 0, 0.0, "agent")}
    if any(call.problem for call in reply.tool_calls):
        own["tool_calls"] = wire["tool_calls"]
    whole = {} if has_response else {"response": to_response(reply)}
    return {"id": reply.id, "seen": seen} | own | whole


def parse_reply_fields(response: Any, metadata: Fields) -> dict[str, Any]:
    """Return the fields of a `ModelReply` from a response.

    Args:
        metadata: names a call that the response must contain; empty for a response without calls.
    """
    response = to_object(response)
    choices = response.get("choices")
    choice = to_object(choices[0]) if isinstance(choices, list) and choices else {}
    message = to_object(choice.get("message"))
    calls = list(_calls(message.get("tool_calls")))
    call_id = metadata.get("tool_call_id")
    if metadata and all(call["id"] != call_id for call in calls):
        calls.append({"id": to_text(call_id), "name": to_text(metadata.get("function_name")), "arguments": "{}"})
    thinking = message.get("thinking_blocks")
    return {
        "content": parse_content_text(message.get("content")),
        "tool_calls": calls,
        "thinking_blocks": [block for block in thinking if isinstance(block, dict)]
        if isinstance(thinking, list)
        else [],
        "model": to_text(response.get("model")),
        "response_id": to_text(response.get("id")),
        "stop_reason": to_text(choice.get("finish_reason")),
        "usage": parse_usage(response.get("usage")),
    }


def parse_usage(usage: Any) -> dict[str, int]:
    """Return the tokens of a response. Cached tokens are recognised in any provider's form."""
    usage = to_object(usage)
    details = to_object(usage.get("prompt_tokens_details"))
    read = parse_count(details.get("cached_tokens")) or parse_count(usage.get("cache_read_input_tokens"))
    return {
        "prompt_tokens": parse_count(usage.get("prompt_tokens")),
        "completion_tokens": parse_count(usage.get("completion_tokens")),
        "cache_read_tokens": read,
        "cache_write_tokens": parse_count(usage.get("cache_creation_input_tokens")),
    }


def parse_count(value: Any) -> int:
    """Return a number of tokens; 0 for an invalid one."""
    number = parse_amount(value)
    return int(number) if number is not None and number <= _MAX_TOKENS else 0


def parse_amount(value: Any) -> float | None:
    """Return a finite number that is not negative, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) and value >= 0 else None


def parse_content_text(content: Any) -> str:
    """Return the text of a message, which may consist of parts."""
    if isinstance(content, list):
        return "\n".join(to_text(part.get("text")) for part in content if isinstance(part, dict) and part.get("text"))
    return to_text(content)


def _calls(calls: Any) -> Iterable[dict[str, str]]:
    for call in calls if isinstance(calls, list) else ():
        function = to_object(to_object(call).get("function"))
        if isinstance(call.get("id"), str) and isinstance(function.get("name"), str):
            yield {"id": call["id"], "name": function["name"], "arguments": to_text(function.get("arguments")) or "{}"}


def to_object(value: Any) -> Fields:
    """Return an object; empty for anything else."""
    return value if isinstance(value, dict) else {}


def to_text(value: Any) -> str:
    """Return a text; empty for anything else."""
    return value if isinstance(value, str) else ""
