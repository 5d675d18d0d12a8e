"""Anthropic's Messages: how a request is checked, and how a turn and an error look on the wire."""

import json
import re
from collections.abc import Mapping
from typing import Any

from controller_worker.providers.scripted import ScriptedTurn, write_tool_calls
from tests.model_server.chat_format import pieces

PATH = "/v1/messages"

_ERRORS: Mapping[str, tuple[int, str, str]] = {
    "rate_limit": (429, "rate_limit_error", "This request would exceed your organization's rate limit."),
    "no_credits": (400, "invalid_request_error", "Your credit balance is too low to access the Anthropic API."),
    "unauthorized": (401, "authentication_error", "invalid x-api-key"),
    "forbidden": (403, "permission_error", "Your API key does not have permission to use the specified resource."),
    "unknown_model": (404, "not_found_error", "model not found"),
    "context_overflow": (400, "invalid_request_error", "prompt is too long: 210000 tokens > 200000 maximum"),
    "content_policy": (400, "invalid_request_error", "Output blocked by content filtering policy"),
    "too_large": (413, "request_too_large", "Request exceeds the maximum size"),
    "bad_request": (400, "invalid_request_error", "messages: invalid value"),
    "bad_gateway": (502, "api_error", "Bad gateway"),
    "unavailable": (503, "api_error", "Service unavailable"),
    "gateway_timeout": (504, "timeout_error", "Gateway timeout"),
    "overloaded": (529, "overloaded_error", "Overloaded"),
    "server_error": (500, "api_error", "Internal server error"),
}
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
_FIRST_VERSION_WITHOUT_SAMPLING = "2026-10-21"
_NAME, _ID = re.compile(r"^[a-zA-Z0-9_-]{1,128}$"), re.compile(r"^[a-zA-Z0-9_-]+$")


def error(kind: str, text: str | None = None) -> tuple[int, bytes]:
    """Return status and body of an error."""
    status, error_type, message = _ERRORS[kind]
    body = {"type": "error", "error": {"type": error_type, "message": text or message}, "request_id": "req_1"}
    return status, json.dumps(body).encode()


def replies_so_far(body: Mapping[str, Any]) -> int:
    """Return how many replies the request's history has."""
    return sum(message["role"] == "assistant" for message in body["messages"])


def complaint(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """Return why the provider would refuse the request, or None."""
    if "max_tokens" not in body:
        return "max_tokens: Field required"
    if headers.get("anthropic-version", "") >= _FIRST_VERSION_WITHOUT_SAMPLING:
        for name in ("temperature", "top_p", "top_k"):
            if name in body:
                return f"{name}: Extra inputs are not permitted"
    if (body.get("thinking") or {}).get("type") == "enabled":
        if body.get("temperature", 1) != 1 or "top_k" in body:
            return "`temperature` may only be set to 1 when thinking is enabled."
        spoken = [message["content"] for message in body["messages"] if message["role"] == "assistant"]
        if spoken and spoken[-1][-1]["type"] == "tool_use" and "thinking" not in spoken[-1][0]["type"]:
            return "Expected `thinking` or `redacted_thinking`, but found `tool_use`."
    open_calls: set[str] = set()
    known_calls: set[str] = set()
    for index, message in enumerate(body["messages"]):
        blocks = message["content"] if isinstance(message["content"], list) else []
        uses = [block for block in blocks if block["type"] == "tool_use"]
        if not all(_NAME.fullmatch(use["name"]) for use in uses):
            return f"messages.{index}: tool_use.name: String should match pattern '{_NAME.pattern}'"
        if not all(_ID.fullmatch(use["id"]) for use in uses):
            return f"messages.{index}: tool_use.id: String should match pattern '{_ID.pattern}'"
        if known_calls & {use["id"] for use in uses}:
            return f"messages.{index}: `tool_use` ids must be unique"
        known_calls |= {use["id"] for use in uses}
        if any(block["type"] == "text" and not block["text"] for block in blocks):
            return f"messages.{index}: text content blocks must be non-empty"
        results = {block["tool_use_id"] for block in blocks if block["type"] == "tool_result"}
        if open_calls - results:
            return f"messages.{index}: `tool_use` ids were found without `tool_result` blocks immediately after"
        if results - open_calls:
            return f"messages.{index}: unexpected `tool_use_id` found in `tool_result` blocks"
        open_calls = {use["id"] for use in uses}
    return "messages: `tool_use` ids were found without `tool_result` blocks immediately after" if open_calls else None


def reply(turn: ScriptedTurn, number: int, model: str) -> bytes:
    """Return the body of a turn."""
    return json.dumps(_frame(number, model) | {
        "content": _content(turn, number),
        "stop_reason": _stop_reason(turn),
        "usage": _usage(turn),
    }).encode()  # fmt: skip


def no_choices(number: int, model: str, *, is_stream: bool) -> bytes:
    """Return a reply without a content block."""
    return (stream if is_stream else reply)(ScriptedTurn(), number, model)


def stream(turn: ScriptedTurn, number: int, model: str) -> bytes:
    """Return the server-sent events of a turn."""
    usage = _usage(turn)
    start = _frame(number, model) | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 1}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for index, block in enumerate(_content(turn, number)):
        opening, deltas = _block_events(block)
        events.append({"type": "content_block_start", "index": index, "content_block": opening})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    events.append({
        "type": "message_delta",
        "delta": {"stop_reason": _stop_reason(turn), "stop_sequence": None},
        "usage": {"output_tokens": usage["output_tokens"]},
    })  # fmt: skip
    events.append({"type": "message_stop"})
    return b"".join(_event(event) for event in events)


def error_event() -> bytes:
    """Return the event that ends a stream that fails midway."""
    return _event({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})


def _frame(number: int, model: str) -> dict[str, Any]:
    return {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": model, "stop_sequence": None}


def _content(turn: ScriptedTurn, number: int) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if turn.thinking:
        blocks.append({"type": "thinking", "thinking": turn.thinking, "signature": f"sig-{number}"})
    if turn.text:
        blocks.append({"type": "text", "text": turn.text})
    # Arguments that are not an object cannot come from Anthropic; a gateway in between can still write a string.
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
        for call in write_tool_calls(turn.tool_calls, number, None)
    ]
    return blocks


def _input(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _block_events(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    match block["type"]:
        case "text":
            return block | {"text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
        case "thinking":
            deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
            return block | {"thinking": "", "signature": ""}, [
                *deltas,
                {"type": "signature_delta", "signature": block["signature"]},
            ]
    written = pieces(json.dumps(block["input"]))
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in written]


def _event(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def _stop_reason(turn: ScriptedTurn) -> str:
    stop_reason = turn.stop_reason or ("tool_calls" if turn.tool_calls else "stop")
    return _STOP_REASONS.get(stop_reason, stop_reason)


def _usage(turn: ScriptedTurn) -> dict[str, int]:
    usage = turn.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cache_read_tokens - usage.cache_write_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": usage.cache_read_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
    }
