"""A model's reply as OpenHands records it: a copy of the provider's response in every event that it led to.

Holds: tokens from the provider's cache are where litellm puts them. `reply_extension`, which only Deckhands reads, has
the data without a place in a response (requester, seen events, cost, latency, thinking).
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


def response_of(reply: ModelReply) -> dict[str, Any]:
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


def unknown_response(call: ToolCallMetadata) -> dict[str, Any]:
    """Return a substitute for the response of a call whose reply is not in the log."""
    called = ModelToolCall(id=call.tool_call_id, name=call.function_name, arguments="{}")
    return response_of(ModelReply(id=call.reply_id, tool_calls=(called,), stop_reason="tool_calls"))


def reply_extension(reply: ModelReply, *, seen: int, has_response: bool) -> dict[str, Any]:
    """Return the data of a reply that the response does not contain.

    Args:
        seen: the last recorded event in its prompt; -1 for none.
        has_response: the recorded event has the response itself in another field.
    """
    wire = reply.wire()
    own = {name: wire[name] for name in OWN_FIELDS if wire.get(name) not in (None, [], 0, 0.0, "agent")}
    if any(call.problem for call in reply.tool_calls):
        own["tool_calls"] = wire["tool_calls"]
    whole = {} if has_response else {"response": response_of(reply)}
    return {"id": reply.id, "seen": seen} | own | whole


def reply_fields(response: Any, metadata: Fields) -> dict[str, Any]:
    """Return the fields of a `ModelReply` from a response.

    Args:
        metadata: names the call that the response must contain at least; empty for a response without calls.
    """
    response = object_in(response)
    choices = response.get("choices")
    choice = object_in(choices[0]) if isinstance(choices, list) and choices else {}
    message = object_in(choice.get("message"))
    calls = list(_calls(message.get("tool_calls")))
    call_id = metadata.get("tool_call_id")
    if metadata and all(call["id"] != call_id for call in calls):
        calls.append({"id": text_in(call_id), "name": text_in(metadata.get("function_name")), "arguments": "{}"})
    thinking = message.get("thinking_blocks")
    return {
        "content": content_text(message.get("content")),
        "tool_calls": calls,
        "thinking_blocks": [block for block in thinking if isinstance(block, dict)]
        if isinstance(thinking, list)
        else [],
        "model": text_in(response.get("model")),
        "response_id": text_in(response.get("id")),
        "stop_reason": text_in(choice.get("finish_reason")),
        "usage": usage_of(response.get("usage")),
    }


def usage_of(usage: Any) -> dict[str, int]:
    """Return the tokens of a response; those of the cache are found in any provider's form."""
    usage = object_in(usage)
    details = object_in(usage.get("prompt_tokens_details"))
    read = count(details.get("cached_tokens")) or count(usage.get("cache_read_input_tokens"))
    return {
        "prompt_tokens": count(usage.get("prompt_tokens")),
        "completion_tokens": count(usage.get("completion_tokens")),
        "cache_read_tokens": read,
        "cache_write_tokens": count(usage.get("cache_creation_input_tokens")),
    }


def count(value: Any) -> int:
    """Return a number of tokens; 0 for an invalid one."""
    number = amount(value)
    return int(number) if number is not None and number <= _MAX_TOKENS else 0


def amount(value: Any) -> float | None:
    """Return a finite number that is not negative, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) and value >= 0 else None


def content_text(content: Any) -> str:
    """Return the text of a message, which may consist of parts."""
    if isinstance(content, list):
        return "\n".join(text_in(part.get("text")) for part in content if isinstance(part, dict) and part.get("text"))
    return text_in(content)


def _calls(calls: Any) -> Iterable[dict[str, str]]:
    for call in calls if isinstance(calls, list) else ():
        function = object_in(object_in(call).get("function"))
        if isinstance(call.get("id"), str) and isinstance(function.get("name"), str):
            yield {"id": call["id"], "name": function["name"], "arguments": text_in(function.get("arguments")) or "{}"}


def object_in(value: Any) -> Fields:
    """Return an object; empty for anything else."""
    return value if isinstance(value, dict) else {}


def text_in(value: Any) -> str:
    """Return a text; empty for anything else."""
    return value if isinstance(value, str) else ""
