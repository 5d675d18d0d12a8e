"""A reply of the log as a stream of the Messages protocol, for the process of the Claude Agent SDK.

Holds: the ids of calls are the log's, so that results from the SDK can be matched to actions. The usage is always the
same few tokens: the log has the real cost, and a CLI with a full window would compact a history that no model reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SERVER = "deckhands"
PREFIX = f"mcp__{SERVER}__"
"""The CLI's prefix for the tools of our MCP server."""

_USAGE = {
    "input_tokens": 1,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": 1,
}

PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def to_stream(reply: Mapping[str, Any]) -> bytes:
    """Return a reply as server-sent events.

    Args:
        reply: `id`, `model`, `text`, and `calls`, each with `id`, `name` and `input` (an object).
    """
    blocks = list(_to_blocks(reply["text"], reply["calls"]))
    message = {
        "id": reply["id"] or "msg_deckhands",
        "type": "message",
        "role": "assistant",
        "model": reply["model"],
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _USAGE,
    }
    events: list[dict[str, Any]] = [{"type": "message_start", "message": message}]
    for index, (begun, delta) in enumerate(blocks):
        events += [
            {"type": "content_block_start", "index": index, "content_block": begun},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    stop = "tool_use" if reply["calls"] else "end_turn"
    ended = {"stop_reason": stop, "stop_sequence": None}
    events += [{"type": "message_delta", "delta": ended, "usage": {"output_tokens": 1}}, {"type": "message_stop"}]
    return b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)


def _to_blocks(text: str, calls: Sequence[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    if text or not calls:  # a message must not be empty
        yield {"type": "text", "text": ""}, {"type": "text_delta", "text": text or "(nothing)"}
    for call in calls:
        begun = {"type": "tool_use", "id": call["id"], "name": PREFIX + call["name"], "input": {}}
        yield begun, {"type": "input_json_delta", "partial_json": json.dumps(call["input"])}
