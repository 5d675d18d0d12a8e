"""OpenAI's Responses API, by litellm: the same conversation, in another form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller_worker.providers.errors import ModelError
from controller_worker.providers.llm import CallUsage, Completion, Delta, ModelRequest
from controller_worker.providers.messages.messages import ImagePart, Message, TextPart
from tests.integration.llm_requests import TOOL, opened
from tests.integration.test_llm_failures import FAILURES
from tests.model_server.running_server import RunningModelServer

pytest_plugins = ("tests.model_server.fixtures",)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the 'model_.* attribute on the instance:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Item '.*' on TypedDict class:UserWarning"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
]

both = pytest.mark.parametrize("is_streamed", [False, True])
TASK = Message("user", (TextPart("Do it."), ImagePart("data:image/png;base64,AAAA")))


@pytest.fixture(scope="module")
def server(shared_model_server: Callable[..., RunningModelServer]) -> RunningModelServer:
    return shared_model_server("--builtin", "bash:2")


async def ask(
    server: RunningModelServer, *messages: Message, shown: list[Delta] | None = None, **settings: Any
) -> Completion:
    fields = {"model": "openai/responses/gpt-5", "base_url": server.url + "/v1", "api_key": "k"}
    on_delta = None if shown is None else shown.append
    async with opened(**fields | settings) as llm:
        return await llm.complete(ModelRequest(messages, (TOOL,), "c1", len(messages) // 3, "/w", on_delta=on_delta))


def answer_to(reply: Completion) -> tuple[Message, Message]:
    """Return a reply as the history has it, and the result of its call."""
    said = Message("assistant", (TextPart(reply.text),), reply.tool_calls, thinking_blocks=reply.thinking_blocks)
    return said, Message("tool", (TextPart("done"),), tool_call_id=reply.tool_calls[0].id, name="execute_bash")


@both
async def test_two_steps(server: RunningModelServer, is_streamed: bool) -> None:
    server.clear()
    shown: list[Delta] | None = [] if is_streamed else None
    system = Message("system", (TextPart("Be good."),))
    first = await ask(server, system, TASK, shown=shown)
    (call,) = first.tool_calls
    assert (first.text, first.stop_reason, call.name) == ("Step 1.", "tool_calls", "execute_bash")
    assert call.arguments == '{"command": "echo step 1 >> steps.txt"}'
    assert first.usage == CallUsage(prompt_tokens=1_100, completion_tokens=50)
    assert first.cost_usd == pytest.approx(1_100 * 1.25e-6 + 50 * 10e-6)
    assert (await ask(server, system, TASK, *answer_to(first))).text == "Step 2."
    requests = server.requests()
    assert {request["path"] for request in requests} == {"/v1/responses"}
    kinds: list[Any] = [item.get("type") for item in requests[1]["body"]["input"]]
    assert kinds == ["message", "message", "function_call", "function_call_output"]
    if shown is not None:
        assert "".join(delta.text for delta in shown if delta.kind == "text") == "Step 1."


@both
@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("openai/gpt-5-codex", "/v1/responses"),
        ("openai/gpt-5.2-pro", "/v1/responses"),
        ("openai/o3-pro-2025-06-10", "/v1/responses"),
        ("openai/gpt-5", "/v1/chat/completions"),
        ("gpt-5-codex", "/v1/chat/completions"),  # a server's own model of this name
    ],
)
async def test_models_without_chat_completions_use_responses(
    server: RunningModelServer, is_streamed: bool, model: str, path: str
) -> None:
    server.clear()
    shown: list[Delta] | None = [] if is_streamed else None
    first = await ask(server, TASK, shown=shown, model=model)
    assert (await ask(server, TASK, *answer_to(first), model=model)).text == "Step 2."
    assert {request["path"] for request in server.requests()} == {path}
    assert {request["body"]["model"] for request in server.requests()} == {model.removeprefix("openai/")}
    assert first.usage == CallUsage(prompt_tokens=1_100, completion_tokens=50)
    assert (first.cost_usd or 0) > 0


@both
@pytest.mark.parametrize("model", ["openai/responses/gpt-5", "openai/gpt-5-codex"])
async def test_a_reasoning_item_returns_sealed_before_its_call(
    shared_model_server: Callable[..., RunningModelServer], tmp_path: Path, is_streamed: bool, model: str
) -> None:
    call = {"name": "execute_bash", "arguments": {"command": "true"}}
    script = {"turns": [{"thinking": "Hm.", "text": "Now.", "tool_calls": [call]}, {"text": "Done."}]}
    (tmp_path / "script.json").write_text(json.dumps(script))
    server = shared_model_server("--script", str(tmp_path / "script.json"))
    first = await ask(server, TASK, shown=[] if is_streamed else None, model=model)
    extra = {"extra_body": {"user": "u"}}
    assert (await ask(server, TASK, *answer_to(first), model=model, completion_kwargs=extra)).text == "Done."
    asked = [request["body"] for request in server.requests()]
    assert [body["include"] for body in asked] == [["reasoning.encrypted_content"]] * 2
    assert asked[1]["user"] == "u"
    thoughts = [item for item in asked[1]["input"] if item["type"] == "reasoning"]
    assert [item["encrypted_content"] for item in thoughts] == ["sealed-0"]
    kinds = [item["type"] for item in asked[1]["input"]]
    assert kinds.index("reasoning") < kinds.index("function_call")


@both
@pytest.mark.parametrize(
    "kind",
    [
        *("rate_limit", "server_error", "unavailable", "overloaded", "unauthorized", "context_overflow"),
        *("content_policy", "no_credits", "reset", "cut", "truncated", "empty_body", "html", "not_an_object"),
        "empty_choices",
    ],
)
async def test_errors_are_the_same(server: RunningModelServer, is_streamed: bool, kind: str) -> None:
    server.plan({"kind": kind})
    with pytest.raises(ModelError) as caught:
        await ask(server, TASK, shown=[] if is_streamed else None)
    assert caught.value.code == FAILURES[kind][0]


@both
async def test_malformed_calls_come_through_as_they_are(server: RunningModelServer, is_streamed: bool) -> None:
    async def spoilt(kind: str) -> Completion:
        server.plan({"kind": kind})
        return await ask(server, TASK, shown=[] if is_streamed else None)

    assert [call.arguments for call in (await spoilt("bad_arguments")).tool_calls] == ['{"command": "ls']
    assert [call.name for call in (await spoilt("unknown_tool")).tool_calls] == ["no_such_tool"]
    assert [call.id for call in (await spoilt("duplicate_ids")).tool_calls] == ["call_same"] * 2
    assert len({call.id for call in (await spoilt("many_calls")).tool_calls}) == 50
    assert 1_000 < (await spoilt("wrong_usage")).usage.prompt_tokens < 10_000
