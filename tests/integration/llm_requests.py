"""One call of a model as its backends send it: a history with a tool call and its result, and a tool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from broker.contract.tool_specs import ToolSpec
from broker.runtime.clock import SystemClock
from controller_worker.model.registry import create_llm
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.llm import LLM, Completion, ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart, ToolCall
from tests.model_server.running_server import RunningModelServer

TOOL = ToolSpec("execute_bash", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
HISTORY = (
    Message("system", (TextPart("Be good."),)),
    Message("user", (TextPart("Write a file."),)),
    Message("assistant", (TextPart("Step 1."),), (ToolCall("call_0001_0", "execute_bash", '{"command": "ls"}'),)),
    Message("tool", (TextPart("a.txt"),), tool_call_id="call_0001_0", name="execute_bash"),
)
REQUEST = ModelRequest(HISTORY, (TOOL,), "c1", 1, "/w")


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[LLM]:
    """Yield a client with these settings."""
    llm = create_llm(LLMConfig.create(**settings), SystemClock())
    try:
        yield llm
    finally:
        await llm.aclose()


async def answer(server: RunningModelServer, settings: dict[str, Any], request: ModelRequest = REQUEST) -> Completion:
    """Send one request with a new client, for a whole reply if the settings do not say otherwise; afterwards the server has seen nothing else."""
    server.clear()
    async with opened(**{"stream_replies": "off"} | settings) as llm:
        return await llm.complete(request)
