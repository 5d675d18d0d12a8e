"""OpenAI's Responses API, by litellm: the same conversation, in another form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker.tool_specs import ToolSpec
from controller_worker.llm.config import LLMConfig
from controller_worker.llm.errors import ModelError
from controller_worker.llm.llm import Completion, Delta, ModelRequest, Usage
from controller_worker.llm.messages import ImagePart, Message, TextPart
from controller_worker.llm.registry import create_llm
from tests.model_server.running_server import RunningModelServer

pytest_plugins = ("tests.model_server.fixtures",)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the 'model_.* attribute on the instance:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Item '.*' on TypedDict class:UserWarning"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
]

RUN = ToolSpec("execute_bash", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
TASK = Message("user", (TextPart("Do it."), ImagePart("data:image/png;base64,AAAA")))


@pytest.fixture(scope="module")
def server(shared_model_server: Callable[..., RunningModelServer]) -> RunningModelServer:
    return shared_model_server("--builtin", "bash:2")


async def ask(server: RunningModelServer, *messages: Message, shown: list[Delta] | None = None) -> Completion:
    llm = create_llm(LLMConfig.create(model="openai/responses/gpt-5", base_url=server.url + "/v1", api_key="k"))
    on_delta = None if shown is None else shown.append
    try:
        return await llm.complete(ModelRequest(messages, (RUN,), "c1", len(messages) // 3, "/w", on_delta=on_delta))
    finally:
        await llm.aclose()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_two_steps(server: RunningModelServer, is_streamed: bool) -> None:
    server.clear()
    shown: list[Delta] | None = [] if is_streamed else None
    system = Message("system", (TextPart("Be good."),))
    first = await ask(server, system, TASK, shown=shown)
    (call,) = first.tool_calls
    assert (first.text, first.stop_reason, call.name) == ("Step 1.", "tool_calls", "execute_bash")
    assert call.arguments == '{"command": "echo step 1 >> steps.txt"}'
    assert first.usage == Usage(prompt_tokens=1_100, completion_tokens=50)
    assert first.cost_usd == pytest.approx(1_100 * 1.25e-6 + 50 * 10e-6)
    answered = (
        Message("assistant", (TextPart(first.text),), first.tool_calls, thinking_blocks=first.thinking_blocks),
        Message("tool", (TextPart("done"),), tool_call_id=call.id, name=call.name),
    )
    assert (await ask(server, system, TASK, *answered)).text == "Step 2."
    requests = server.requests()
    assert {request["path"] for request in requests} == {"/v1/responses"}
    kinds: list[Any] = [item.get("type") for item in requests[1]["body"]["input"]]
    assert kinds == ["message", "message", "function_call", "function_call_output"]
    if shown is not None:
        assert "".join(delta.text for delta in shown if delta.kind == "text") == "Step 1."


@pytest.mark.parametrize(
    ("kind", "code"),
    [("rate_limit", "rate_limit"), ("context_overflow", "context_window"), ("overloaded", "service_unavailable")],
)
async def test_errors_are_the_same(server: RunningModelServer, kind: str, code: str) -> None:
    server.plan({"kind": kind})
    with pytest.raises(ModelError) as caught:
        await ask(server, TASK)
    assert caught.value.code == code
