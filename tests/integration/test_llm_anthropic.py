"""The Anthropic backend: its literal requests, and the parsing of replies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx2
import pytest

from broker.runtime.clock import SystemClock
from controller_worker.model.registry import create_llm
from controller_worker.providers.anthropic_backend import SdkTransport
from controller_worker.providers.config import CUSTOM_HEADERS, LLMConfig
from controller_worker.providers.errors import BadRequestError, LLMConfigError
from controller_worker.providers.llm import CallUsage, Completion, ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart, ToolCall
from controller_worker.providers.wires.raw_client import make_connection_options, make_timeouts
from tests.integration.llm_requests import HISTORY, TOOL, answer, opened
from tests.model_server.running_server import RunningModelServer

pytest_plugins = ("tests.model_server.fixtures",)


@pytest.fixture(scope="module")
def server(shared_model_server: Callable[..., RunningModelServer]) -> RunningModelServer:
    return shared_model_server("--builtin", "bash:3")


async def ask(server: RunningModelServer, **settings: Any) -> Completion:
    return await answer(server, {"model": "claude-sonnet-5", "api_key": "k", "base_url": server.url} | settings)


async def sent(server: RunningModelServer, **settings: Any) -> dict[str, Any]:
    await ask(server, **settings)
    body: dict[str, Any] = server.requests()[0]["body"]
    return body


async def test_a_whole_request_and_its_reply(server: RunningModelServer) -> None:
    reply = await ask(server, model="anthropic/claude-sonnet-5", base_url=server.url + "/v1/", stream_replies="auto")
    (request,) = server.requests()
    assert request["path"] == "/v1/messages"
    assert request["body"] == {
        "model": "claude-sonnet-5",
        "max_tokens": 64_000,
        "stream": True,  # so long a reply may take minutes
        "system": [{"type": "text", "text": "Be good.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "execute_bash", "description": "Run a command.", "input_schema": TOOL.parameters}],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Write a file.", "cache_control": {"type": "ephemeral"}}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Step 1."},
                    {"type": "tool_use", "id": "call_0001_0", "name": "execute_bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_0001_0",
                        "content": [{"type": "text", "text": "a.txt"}],
                        "cache_control": {"type": "ephemeral"},
                    }
                ],
            },
        ],
    }
    headers = {name.lower(): value for name, value in request["headers"].items()}
    assert (headers["authorization"], headers["x-api-key"]) == ("Bearer k", "k")
    assert headers["content-type"] == "application/json"
    assert headers["anthropic-version"] >= "2026-10-21"
    assert (reply.text, reply.model, reply.response_id, reply.stop_reason) == (
        "Step 2.", "claude-sonnet-5", "msg_1", "tool_calls",
    )  # fmt: skip
    assert reply.tool_calls == (ToolCall("call_0002_0", "execute_bash", '{"command": "echo step 2 >> steps.txt"}'),)
    assert reply.usage == CallUsage(prompt_tokens=1_200, completion_tokens=50)
    # claude-sonnet-5: 2 and 10 USD per million tokens
    assert reply.cost_usd == pytest.approx(1_200 * 2e-6 + 50 * 10e-6)
    assert 0 < reply.latency_seconds < 10


async def test_sdk_and_direct_requests_are_the_same(
    server: RunningModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ask(server)
    (direct,) = server.requests()
    monkeypatch.setenv(CUSTOM_HEADERS, "x-gateway: 1")
    await ask(server)
    (by_sdk,) = server.requests()
    assert list(direct["body"].items()) == list(by_sdk["body"].items())
    headers, sdk_headers = (
        {name.lower(): text for name, text in request["headers"].items()} for request in (direct, by_sdk)
    )
    names = ("authorization", "x-api-key", "anthropic-version", "content-type", "content-length")
    assert [headers[name] for name in names] == [sdk_headers[name] for name in names]
    assert sdk_headers["x-gateway"] == "1"  # only the SDK reads the variable


async def test_the_price_of_an_unknown_claude_is_unknown(server: RunningModelServer) -> None:
    assert (await ask(server, model="claude-of-the-future")).cost_usd is None


async def test_sampling_is_sent_only_to_models_that_accept_it(server: RunningModelServer) -> None:
    body = await sent(server, model="claude-sonnet-4-5", temperature=0.5, top_k=4)
    assert (body["temperature"], body["top_k"], "top_p" in body) == (0.5, 4, False)
    headers = {name.lower(): value for name, value in server.requests()[0]["headers"].items()}
    assert headers["anthropic-version"] == "2023-06-01"
    assert (await sent(server, model="claude-sonnet-4-5", temperature=None, top_p=0.9))["top_p"] == 0.9


async def test_a_request_may_set_the_temperature(server: RunningModelServer) -> None:
    server.clear()
    async with opened(model="claude-sonnet-4-5", api_key="k", base_url=server.url) as llm:
        await llm.complete(ModelRequest(HISTORY, (), "c1", 1, "/w", temperature=1.0))
        await llm.complete(ModelRequest(HISTORY, (), "c1", 1, "/w"))
    assert [request["body"]["temperature"] for request in server.requests()] == [1.0, 0.0]


async def test_unsupported_settings_are_dropped_with_a_warning(
    server: RunningModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "controller_worker"):
        body = await sent(server, model="claude-sonnet-5", temperature=0.5, seed=1)
    assert not {"temperature", "seed"} & set(body)
    assert [record.getMessage() for record in caplog.records] == [
        "The model claude-sonnet-5 does not support seed, temperature; it is not sent."
    ]


@pytest.mark.parametrize(
    ("model", "effort", "fields"),
    [
        ("claude-sonnet-5", "high", {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}),
        ("claude-opus-4-5", "minimal", {"output_config": {"effort": "low"}, "temperature": 0.0}),
        ("claude-sonnet-4-6", "max", {"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}}),
        ("claude-sonnet-4-5", "high", {"temperature": 0.0}),
        ("claude-sonnet-5", "none", {}),
    ],
)
async def test_effort(server: RunningModelServer, model: str, effort: str, fields: dict[str, Any]) -> None:
    body = await sent(server, model=model, reasoning_effort=effort)
    optional = ("output_config", "thinking", "temperature", "top_p", "top_k")
    assert {name: body[name] for name in optional if name in body} == fields


BUDGET = {"thinking": {"type": "enabled", "budget_tokens": 2_000}}


async def test_a_budget_of_thinking_takes_the_place_of_sampling(server: RunningModelServer) -> None:
    server.clear()
    settings = {"model": "claude-sonnet-4-5", "api_key": "k", "completion_kwargs": BUDGET}
    async with opened(**settings, base_url=server.url) as llm:
        await llm.complete(ModelRequest(HISTORY[:2], (), "c1", 0, "/w"))
    body = server.requests()[0]["body"]
    assert body["thinking"] == BUDGET["thinking"]
    assert not {"temperature", "top_p", "top_k"} & set(body)
    kept = {"thinking": {"type": "disabled"}}
    assert (await sent(server, model="claude-sonnet-4-5", completion_kwargs=kept))["temperature"] == 0.0


async def test_turn_of_another_model_continues_without_thinking_budget(server: RunningModelServer) -> None:
    assert "thinking" not in await sent(server, model="claude-sonnet-4-5", completion_kwargs=BUDGET)
    # Models that decide by themselves how much to think do not mind.
    assert "thinking" in await sent(server, reasoning_effort="high")


@pytest.mark.parametrize(
    ("settings", "max_tokens"),
    [
        ({"model": "claude-sonnet-5"}, 64_000),
        ({"model": "claude-of-the-future"}, 8_192),
        ({"model": "claude-sonnet-5", "max_output_tokens": 100_000}, 100_000),
    ],
)
async def test_max_tokens(server: RunningModelServer, settings: dict[str, Any], max_tokens: int) -> None:
    assert (await sent(server, **settings))["max_tokens"] == max_tokens


async def test_the_limit_of_one_request_goes_before_the_clients(server: RunningModelServer) -> None:
    import anthropic

    config = LLMConfig.create(model="anthropic/claude-sonnet-5", api_key="k", base_url=server.url, read_timeout=200.0)
    client = anthropic.AsyncAnthropic(
        api_key="k",
        base_url=server.url,
        max_retries=0,
        http_client=anthropic.DefaultAioHttpClient(**make_connection_options(httpx2, config)),
    )
    transport = SdkTransport(client, httpx2, anthropic.AnthropicError, partial(make_timeouts, httpx2, config))
    server.plan({"kind": "hang"})
    body = b'{"model": "claude-sonnet-5", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}'
    try:
        with pytest.raises(anthropic.APITimeoutError):
            async with asyncio.timeout(20):
                await transport.post("/v1/messages", body, {}, read_seconds=0.05)
    finally:
        await transport.aclose()


async def test_no_marks_without_caching(server: RunningModelServer) -> None:
    assert "cache_control" not in str(await sent(server, caching_prompt=False))


async def test_thinking_is_kept_and_replayed_with_its_signature(
    model_server: Callable[..., RunningModelServer], tmp_path: Any
) -> None:
    script = tmp_path / "thinking.json"
    script.write_text('{"turns": [{"thinking": "Hm.", "tool_calls": [{"name": "think"}]}, {"text": "Done."}]}')
    server = model_server("--script", str(script))
    user = Message("user", (TextPart("go"),))
    async with opened(model="claude-sonnet-5", api_key="k", base_url=server.url) as llm:
        first = await llm.complete(ModelRequest((user,), (), "c1", 0, "/w"))
        assert first.thinking_blocks == ({"type": "thinking", "thinking": "Hm.", "signature": "sig-0"},)
        said = Message("assistant", (), first.tool_calls, thinking_blocks=first.thinking_blocks)
        done = Message("tool", (TextPart("ok"),), tool_call_id=first.tool_calls[0].id, name="think")
        assert (await llm.complete(ModelRequest((user, said, done), (), "c1", 1, "/w"))).text == "Done."
    assert server.requests()[1]["body"]["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "sig-0"},
        {"type": "tool_use", "id": "call_0001_0", "name": "think", "input": {}},
    ]


async def test_extra_fields_of_the_body_are_fields_of_the_body(server: RunningModelServer) -> None:
    kwargs = {"extra_body": {"metadata": {"user_id": "u"}}, "service_tier": "auto"}
    body = await sent(server, completion_kwargs=kwargs)
    assert (body["metadata"], body["service_tier"], "extra_body" in body) == ({"user_id": "u"}, "auto", False)


async def test_a_history_that_the_api_refuses_is_a_bad_request(server: RunningModelServer) -> None:
    async with opened(model="claude-sonnet-5", api_key="k", base_url=server.url) as llm:
        with pytest.raises(BadRequestError) as caught:
            await llm.complete(ModelRequest(HISTORY[:3], (), "c1", 1, "/w"))
    told = "messages: `tool_use` ids were found without `tool_result` blocks immediately after"
    assert caught.value.provider_text == told


def test_without_a_key_nothing_is_created(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANTHROPIC_CONFIG_DIR", str(tmp_path))
    with pytest.raises(LLMConfigError, match=r"There is no key for 'claude-sonnet-5'.*Set LLM_API_KEY\."):
        create_llm(LLMConfig.create(model="claude-sonnet-5"), SystemClock())
