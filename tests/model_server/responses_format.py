"""OpenAI's Responses: how a request is checked, and how a turn and an error look on the wire."""

import json
from collections.abc import Mapping
from typing import Any

from controller_worker.providers.scripted import ScriptedTurn, write_tool_calls
from tests.model_server import chat_format

PATH = "/v1/responses"

error = chat_format.error


def replies_so_far(body: Mapping[str, Any]) -> int:
    """Return the number of replies in the request's history: runs of texts and calls of a model."""
    spoken = [item.get("role") == "assistant" or item.get("type") == "function_call" for item in body["input"]]
    return sum(is_spoken and not before for before, is_spoken in zip([False, *spoken], spoken, strict=False))


def complaint(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """Return why the provider would refuse the request, or None."""
    called = {item["call_id"] for item in body["input"] if item.get("type") == "function_call"}
    answered = {item["call_id"] for item in body["input"] if item.get("type") == "function_call_output"}
    if called - answered:
        return f"No tool output found for function call {min(called - answered)}."
    if answered - called:
        return f"No tool call found for function call output with call_id {min(answered - called)}."
    return None


def reply(turn: ScriptedTurn, number: int, model: str) -> bytes:
    """Return the body of a turn."""
    return json.dumps(_response(turn, number, model)).encode()


def no_choices(number: int, model: str, *, is_stream: bool) -> bytes:
    """Return a reply without an output."""
    return (stream if is_stream else reply)(ScriptedTurn(), number, model)


def stream(turn: ScriptedTurn, number: int, model: str) -> bytes:
    """Return the server-sent events of a turn."""
    whole = _response(turn, number, model)
    begun = whole | {"output": [], "status": "in_progress", "usage": None}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for index, item in enumerate(whole["output"]):
        if item["type"] == "reasoning":
            events.append({"type": "response.output_item.added", "output_index": index, "item": item | {"summary": []}})
            events.append({"type": "response.output_item.done", "output_index": index, "item": item})
            continue
        place = {"output_index": index, "item_id": item["id"]}
        text = item["content"][0]["text"] if item["type"] == "message" else item["arguments"]
        kind = "output_text" if item["type"] == "message" else "function_call_arguments"
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        events.append({"type": "response.output_item.added", "output_index": index, "item": item | empty})
        events += [
            {"type": f"response.{kind}.delta", "content_index": 0, "delta": text[start : start + 12]} | place
            for start in range(0, len(text), 12)
        ]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": whole})
    return b"".join(_event(event | {"sequence_number": number}) for number, event in enumerate(events))


def error_event() -> bytes:
    """Return the event that ends a stream that fails midway."""
    return _event({"type": "error", "code": "server_error", "message": "The server had an error.", "param": None})


def _event(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


def _response(turn: ScriptedTurn, number: int, model: str) -> dict[str, Any]:
    output: list[dict[str, Any]] = []
    if turn.thinking:
        summary = [{"type": "summary_text", "text": turn.thinking}]
        sealed = {"encrypted_content": f"sealed-{number}"}
        output.append({"type": "reasoning", "id": f"rs_{number}", "summary": summary} | sealed)
    if turn.text:
        content = [{"type": "output_text", "text": turn.text, "annotations": []}]
        message = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed"}
        output.append(message | {"content": content})
    output += [
        {
            "type": "function_call",
            "id": f"fc_{call.id}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in write_tool_calls(turn.tool_calls, number, None)
    ]
    usage = turn.usage
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": chat_format.CREATED,
        "model": model,
        "status": "completed",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": 1.0,
        "top_p": 1.0,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cache_read_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }
