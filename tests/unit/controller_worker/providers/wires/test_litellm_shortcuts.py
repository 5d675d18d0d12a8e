"""A shortcut sends what the openai SDK would send."""

from __future__ import annotations

import json
from typing import Any

from controller_worker.providers.wires import litellm_shortcuts

BODY: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be good.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "tool_call_id": "1", "name": "bash", "content": "é \u2028"},
    ],
    "model": "m",
    "temperature": 0.0,
    "stop": ["a"],
    "tools": [{"type": "function", "function": {"name": "bash", "description": "", "parameters": {"type": "object"}}}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}}},
}


async def test_kept_request_is_that_of_the_sdk() -> None:
    from openai import omit
    from openai._utils import async_maybe_transform
    from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming

    body = {**BODY, "audio": omit}
    expected = await async_maybe_transform(body, CompletionCreateParamsStreaming)
    kept = await litellm_shortcuts._keep_given(body, CompletionCreateParamsStreaming)
    assert json.dumps(kept) == json.dumps(expected)
