"""The backends for Chat Completions, our own and litellm's: requests, and the parsing of replies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller_worker.providers.llm import CallUsage, Completion, Delta, ModelRequest
from controller_worker.providers.messages.messages import ImagePart, Message, TextPart, ToolCall
from tests.integration.llm_requests import HISTORY, REQUEST, answer, opened
from tests.model_server.running_server import RunningModelServer

pytest_plugins = ("tests.model_server.fixtures",)


@pytest.fixture(scope="module")
def server(shared_model_server: Callable[..., RunningModelServer]) -> RunningModelServer:
    return shared_model_server("--builtin", "bash:3")


@pytest.fixture(params=["openai", "litellm"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def ask(server: RunningModelServer, backend: str, **settings: Any) -> Completion:
    usual = {"backend": backend, "api_key": "k", "base_url": server.url + "/v1", "native_tool_calling": True}
    return await answer(server, usual | settings)


async def sent(server: RunningModelServer, backend: str, **settings: Any) -> dict[str, Any]:
    await ask(server, backend, **settings)
    body: dict[str, Any] = server.requests()[0]["body"]
    return body


async def test_a_whole_request_and_its_reply(server: RunningModelServer, backend: str) -> None:
    reply = await ask(server, backend, model="my-own", max_output_tokens=500, seed=7, temperature=0.0)
    (request,) = server.requests()
    assert request["path"] == "/v1/chat/completions"
    assert request["body"] == {
        "model": "my-own",
        "temperature": 0.0,
        "seed": 7,
        "max_completion_tokens": 500,
        "messages": [
            {"role": "system", "content": "Be good."},
            {"role": "user", "content": "Write a file."},
            {
                "role": "assistant",
                "content": "Step 1.",
                "tool_calls": [
                    {
                        "id": "call_0001_0",
                        "type": "function",
                        "function": {"name": "execute_bash", "arguments": '{"command": "ls"}'},
                    }
                ],
            },
            {"role": "tool", "content": "a.txt", "tool_call_id": "call_0001_0", "name": "execute_bash"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "execute_bash",
                    "description": "Run a command.",
                    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
                },
            }
        ],
    }
    headers = {name.lower(): value for name, value in request["headers"].items()}
    assert headers["authorization"] == "Bearer k"
    assert (reply.text, reply.model, reply.response_id, reply.stop_reason) == (
        "Step 2.", "my-own", "chatcmpl-1", "tool_calls",
    )  # fmt: skip
    assert reply.tool_calls == (ToolCall("call_0002_0", "execute_bash", '{"command": "echo step 2 >> steps.txt"}'),)
    assert reply.usage == CallUsage(prompt_tokens=1_200, completion_tokens=50)
    assert reply.cost_usd is None
    assert 0 < reply.latency_seconds < 30


@pytest.mark.parametrize(
    ("model", "named"),
    [("my-own", "my-own"), ("openai/my-own", "my-own"), ("Qwen/Qwen3-Coder", "Qwen/Qwen3-Coder")],
)
async def test_models_of_openai_compatible_servers(
    server: RunningModelServer, backend: str, model: str, named: str
) -> None:
    assert (await sent(server, backend, model=model))["model"] == named


async def test_a_server_without_keys_needs_none(server: RunningModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert (await ask(server, "openai", model="my-own", api_key=None)).text == "Step 2."


async def test_prices_are_the_tables_or_the_configured(server: RunningModelServer, backend: str) -> None:
    # gpt-4o: 2.5 and 10 USD per million tokens
    assert (await ask(server, backend, model="openai/gpt-4o")).cost_usd == pytest.approx(1_200 * 2.5e-6 + 50 * 10e-6)
    priced = {"input_cost_per_token": 1e-6, "output_cost_per_token": 4e-6}
    assert (await ask(server, backend, model="my-own", **priced)).cost_usd == pytest.approx(1_200e-6 + 200e-6)


async def test_reasoning_models_take_an_effort_and_no_sampling(server: RunningModelServer, backend: str) -> None:
    body = await sent(server, backend, model="openai/o3", reasoning_effort="high")
    assert body["reasoning_effort"] == "high"
    assert not {"temperature", "top_p"} & set(body)
    assert "reasoning_effort" not in await sent(server, backend, model="my-own", reasoning_effort="high")


async def test_claude_behind_a_gateway_gets_marks(server: RunningModelServer, backend: str) -> None:
    body = await sent(server, backend, model="openai/claude-sonnet-4-5")
    mark = {"type": "ephemeral"}
    assert body["messages"][0]["content"] == [{"type": "text", "text": "Be good.", "cache_control": mark}]
    assert body["messages"][-1]["cache_control"] == mark
    assert (body["temperature"], "top_p" in body) == (0.0, False)


IMAGE = Message("user", (TextPart("Look."), ImagePart("data:image/png;base64,AAAA")))


@pytest.mark.parametrize(
    ("model", "disable_vision", "is_shown"),
    [("gpt-4o", None, True), ("gpt-4o", True, False), ("my-own", None, False), ("my-own", False, True)],
)
async def test_images_are_for_models_that_see(
    server: RunningModelServer, backend: str, model: str, disable_vision: bool | None, is_shown: bool
) -> None:
    settings = {"backend": backend, "model": model, "api_key": "k", "base_url": server.url + "/v1"}
    request = ModelRequest((HISTORY[0], IMAGE), (), "c1", 1, "/w")
    await answer(server, settings | {"disable_vision": disable_vision}, request)
    content = server.requests()[0]["body"]["messages"][1]["content"]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    note = "Look.\n[An image was left out here: this model cannot see images.]"
    assert content == ([{"type": "text", "text": "Look."}, image] if is_shown else note)


async def test_fields_that_win_over_all_others(server: RunningModelServer, backend: str) -> None:
    body = await sent(
        server, backend, model="my-own", temperature=0.5, completion_kwargs={"temperature": 1, "min_p": 0.1}
    )
    assert (body["temperature"], body["min_p"]) == (1, 0.1)


async def test_extra_fields_of_the_body_are_fields_of_the_body(server: RunningModelServer, backend: str) -> None:
    """As the openai client and litellm have it, and every manual of vLLM."""
    kwargs = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}, "min_p": 0.1}
    body = await sent(server, backend, model="my-own", completion_kwargs=kwargs)
    assert (body["chat_template_kwargs"], body["min_p"]) == ({"enable_thinking": False}, 0.1)
    assert "extra_body" not in body


@pytest.mark.filterwarnings("ignore:Accessing the 'model_.* attribute on the instance:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Item '.*' on TypedDict class:UserWarning")
@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(("model", "is_sent"), [("kimi-k2.5", True), ("openai/gpt-4o", False)])
async def test_reasoning_returns_to_a_model_that_wants_it_back(
    shared_model_server: Callable[..., RunningModelServer],
    tmp_path: Path,
    backend: str,
    model: str,
    is_sent: bool,
    is_streamed: bool,
) -> None:
    call = {"name": "execute_bash", "arguments": {"command": "true"}}
    script = {"turns": [{"thinking": "Hm.", "text": "Now.", "tool_calls": [call]}, {"text": "Done."}]}
    (tmp_path / "script.json").write_text(json.dumps(script))
    server = shared_model_server("--script", str(tmp_path / "script.json"))
    url = {"base_url": server.url + "/v1", "native_tool_calling": True, "api_key": "k"}
    shown: list[Delta] = []
    task = Message("user", (TextPart("Do it."),))

    async def step(*messages: Message) -> Completion:
        on_delta = shown.append if is_streamed else None
        return await llm.complete(ModelRequest(messages, (), "c1", len(messages) // 3, "/w", on_delta=on_delta))

    async with opened(model=model, backend=backend, **url) as llm:
        first = await step(task)
        said = Message("assistant", (TextPart(first.text),), first.tool_calls, thinking_blocks=first.thinking_blocks)
        done = Message("tool", (TextPart("ok"),), tool_call_id=first.tool_calls[0].id, name="execute_bash")
        assert (await step(task, said, done)).text == "Done."
    (answer,) = [message for message in server.requests()[1]["body"]["messages"] if message["role"] == "assistant"]
    assert answer.get("reasoning_content") == ("Hm." if is_sent else None)


async def test_a_conversation_is_the_key_of_its_cache(server: RunningModelServer, backend: str) -> None:
    assert (await sent(server, backend, model="my-own", prompt_cache_key=True))["prompt_cache_key"] == "c1"
    assert "prompt_cache_key" not in await sent(server, backend, model="openai/gpt-4o")  # this server is not OpenAI's


async def test_settings_of_the_cache_and_the_tier(server: RunningModelServer, backend: str) -> None:
    claude = {"model": "openai/claude-sonnet-4-5", "cache_lifetime": "1h"}
    body = await sent(server, backend, **claude)
    assert body["messages"][-1]["cache_control"] == {"type": "ephemeral", "ttl": "1h"}
    assert (await sent(server, backend, model="openai/gpt-5", service_tier="flex"))["service_tier"] == "flex"


pytest_plugins = ("tests.model_server.fixtures",)


@pytest.mark.parametrize(
    ("backend", "model", "path", "streams"),
    [
        ("openai", "openai/m", "/v1", False),
        ("openai", "openai/m", "/v1", True),
        ("anthropic", "anthropic/m", "", False),
        ("anthropic", "anthropic/m", "", True),
        pytest.param("litellm", "openai/m", "/v1", False, marks=pytest.mark.soak),
    ],
)
async def test_remaining_quota_comes_with_a_reply(
    model_server: Callable[..., RunningModelServer], backend: Any, model: str, path: str, streams: bool
) -> None:
    # Two seconds' worth at once, and a tenth of a request comes back each second.
    server = model_server("--builtin", "say:hello", "--requests-per-minute", "6")
    request = replace(REQUEST, messages=REQUEST.messages[:2], on_delta=(lambda _: None) if streams else None)
    async with opened(model=model, backend=backend, base_url=server.url + path, api_key="secret-key") as llm:
        assert (await llm.complete(request)).quota_left == {"requests": 0}
