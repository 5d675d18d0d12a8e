"""OpenAI's Chat Completions: how a request is checked, and how a turn and an error look on the wire."""

import json
import re
from collections.abc import Mapping
from typing import Any

from controller_worker.providers.scripted import ScriptedTurn, write_tool_calls

PATH = "/v1/chat/completions"

CREATED = 1_760_000_000
_NAME = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")
_ERRORS: Mapping[str, tuple[int, str, str | None, str]] = {
    "rate_limit": (429, "requests", "rate_limit_exceeded", "Rate limit reached for requests."),
    "no_credits": (429, "insufficient_quota", "insufficient_quota", "You exceeded your current quota."),
    "unauthorized": (401, "invalid_request_error", "invalid_api_key", "Incorrect API key provided."),
    "forbidden": (403, "invalid_request_error", None, "You are not allowed to sample from this model."),
    "unknown_model": (404, "invalid_request_error", "model_not_found", "The model does not exist."),
    "context_overflow": (
        *(400, "invalid_request_error", "context_length_exceeded"),
        "This model's maximum context length is 8192 tokens. Please reduce the length of the messages.",
    ),
    "content_policy": (
        *(400, "invalid_request_error", "content_policy_violation"),
        "Your request was rejected as a result of our safety system.",
    ),
    "too_large": (413, "invalid_request_error", None, "Request too large."),
    "bad_request": (400, "invalid_request_error", None, "Invalid value."),
    "bad_gateway": (502, "server_error", None, "Bad gateway."),
    "unavailable": (503, "server_error", None, "The server is overloaded or not ready yet."),
    "gateway_timeout": (504, "server_error", None, "Gateway timeout."),
    "overloaded": (529, "server_error", None, "Overloaded."),
    "server_error": (500, "server_error", None, "The server had an error."),
}


def error(kind: str, text: str | None = None) -> tuple[int, bytes]:
    """Return status and body of an error."""
    status, error_type, code, message = _ERRORS[kind]
    body = {"error": {"message": text or message, "type": error_type, "param": None, "code": code}}
    return status, json.dumps(body).encode()


def replies_so_far(body: Mapping[str, Any]) -> int:
    """Return how many replies the request's history has."""
    return sum(message["role"] == "assistant" for message in body["messages"])


def complaint(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """Return why the provider would refuse the request, or None."""
    open_calls: set[str] = set()
    for index, message in enumerate(body["messages"]):
        names = [call["function"]["name"] for call in message.get("tool_calls") or () if "function" in call]
        if not all(map(_NAME.fullmatch, names)):
            return (
                f"Invalid 'messages[{index}].tool_calls[0].function.name': string does not match pattern. "
                f"Expected a string that matches the pattern '{_NAME.pattern}'."
            )
        if message["role"] == "tool":
            if message.get("tool_call_id") not in open_calls:
                return "messages with role 'tool' must be a response to a preceding message with 'tool_calls'."
            open_calls.remove(message["tool_call_id"])
        elif open_calls:
            return f"tool_call_ids did not have response messages: {', '.join(sorted(open_calls))}."
        else:
            open_calls = {call["id"] for call in message.get("tool_calls") or ()}
    return "tool_calls at the end have no response messages." if open_calls else None


def reply(turn: ScriptedTurn, number: int, model: str) -> bytes:
    """Return the body of a turn."""
    return json.dumps(_frame("chat.completion", number, model) | {
        "choices": [{"index": 0, "message": _message(turn, number), "logprobs": None, "finish_reason": _finish(turn)}],
        "usage": _usage(turn),
    }).encode()  # fmt: skip


def no_choices(number: int, model: str, *, is_stream: bool) -> bytes:
    """Return a reply without a choice."""
    if is_stream:
        chunk = _frame("chat.completion.chunk", number, model) | {"choices": [], "usage": _usage(ScriptedTurn())}
        return b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n"
    whole = _frame("chat.completion", number, model) | {"choices": [], "usage": _usage(ScriptedTurn())}
    return json.dumps(whole).encode()


def stream(turn: ScriptedTurn, number: int, model: str) -> bytes:
    """Return the server-sent events of a turn."""
    message = _message(turn, number)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in pieces(turn.thinking)]
    deltas += [{"content": piece} for piece in pieces(turn.text)]
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        deltas.append({"tool_calls": [call | {"index": index, "function": function | {"arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            for piece in pieces(function["arguments"])
        ]
    frame = _frame("chat.completion.chunk", number, model)
    chunks = [frame | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append(frame | {"choices": [{"index": 0, "delta": {}, "finish_reason": _finish(turn)}]})
    chunks.append(frame | {"choices": [], "usage": _usage(turn)})
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def error_event() -> bytes:
    """Return the event that ends a stream that fails midway."""
    return b"data: " + error("server_error")[1] + b"\n\n"


def _frame(kind: str, number: int, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": CREATED, "model": model}


def _message(turn: ScriptedTurn, number: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or None}
    if turn.thinking:
        message["reasoning_content"] = turn.thinking
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in write_tool_calls(turn.tool_calls, number, None)
        ]
    return message


def _finish(turn: ScriptedTurn) -> str:
    return turn.stop_reason or ("tool_calls" if turn.tool_calls else "stop")


def _usage(turn: ScriptedTurn) -> dict[str, Any]:
    usage = turn.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cache_read_tokens},
    }


def pieces(text: str, size: int = 12) -> list[str]:
    """Return a text in the pieces in which a stream sends it."""
    return [text[start : start + size] for start in range(0, len(text), size)]
