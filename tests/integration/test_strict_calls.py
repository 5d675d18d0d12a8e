"""Strict tools and structured outputs as each backend sends them, and a provider that refuses them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest

from broker.contract.actions import AgentFinishAction
from broker.contract.agent_state import AgentState
from broker.contract.specs import OutputSpec
from broker.contract.tool_specs import ToolSpec
from broker.log.invariants import find_violations
from broker.log.status import fold_status
from broker.runtime.clock import SystemClock
from controller_worker.loop.replay import replay
from controller_worker.loop.services import Services
from controller_worker.model.models import Models
from controller_worker.providers.errors import BadRequestError
from controller_worker.providers.llm import LLM, ModelRequest
from tests.conversation_hands import CID, Hands
from tests.integration.llm_requests import HISTORY, opened
from tests.model_server.running_server import RunningModelServer

pytest_plugins = ("tests.model_server.fixtures",)

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
STRICT = ToolSpec("strict", "Strict.", SCHEMA)
LOOSE = ToolSpec("loose", "Loose.", {"type": "object", "properties": {"a": {"type": "object"}}})
REQUEST = ModelRequest(HISTORY, (STRICT, LOOSE), "c1", 1, "/w", output_schema=SCHEMA)
ALL_REQUIRED = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": ["integer", "null"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CLOSED = SCHEMA | {"additionalProperties": False}
ON = {"strict_tools": "on", "structured_output": "on"}


@pytest.fixture(scope="module")
def server(shared_model_server: Callable[..., RunningModelServer]) -> RunningModelServer:
    return shared_model_server("--builtin", "bash:3")


def client(server: RunningModelServer, backend: str, **settings: Any) -> AbstractAsyncContextManager[LLM]:
    server.clear()
    usual = {
        "anthropic": {"model": "claude-test", "base_url": server.url},
        "openai": {"model": "my-own", "base_url": server.url + "/v1", "backend": "openai"},
        "litellm": {"model": "openai/my-own", "base_url": server.url + "/v1", "backend": "litellm"},
        "responses": {"model": "openai/responses/my-own", "base_url": server.url + "/v1"},
    }[backend]
    return opened(**usual | {"api_key": "k", "native_tool_calling": True} | settings)


async def sent(server: RunningModelServer, backend: str, request: ModelRequest = REQUEST, **settings: Any) -> Any:
    async with client(server, backend, **settings) as llm:
        await llm.complete(request)
    return server.requests()[-1]["body"]


@pytest.mark.parametrize("backend", ["openai", "litellm"])
async def test_chat_completions(server: RunningModelServer, backend: str) -> None:
    body = await sent(server, backend, **ON)
    strict, loose = (tool["function"] for tool in body["tools"])
    assert (strict["parameters"], strict["strict"]) == (ALL_REQUIRED, True)
    assert (loose["parameters"], loose.get("strict", False)) == (LOOSE.parameters, False)
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": ALL_REQUIRED, "strict": True},
    }


async def test_a_form_of_the_reply_that_is_set_stays(server: RunningModelServer) -> None:
    chosen = {"response_format": {"type": "json_object"}}
    assert (await sent(server, "openai", **ON, completion_kwargs=chosen))["response_format"] == {"type": "json_object"}


async def test_responses(server: RunningModelServer) -> None:
    body = await sent(server, "responses", **ON)
    strict, loose = body["tools"]
    assert (strict["parameters"], strict["strict"]) == (ALL_REQUIRED, True)
    assert not loose.get("strict")
    form = body["text"]["format"]
    assert (form["type"], form["schema"], form["strict"]) == ("json_schema", ALL_REQUIRED, True)


async def test_messages(server: RunningModelServer) -> None:
    body = await sent(server, "anthropic", **ON)
    strict, loose = body["tools"]
    assert (strict["input_schema"], strict["strict"]) == (CLOSED, True)
    assert (loose["input_schema"], "strict" in loose) == (LOOSE.parameters, False)
    assert body["output_config"] == {"format": {"type": "json_schema", "schema": CLOSED}}


async def test_a_form_stands_beside_an_effort(server: RunningModelServer) -> None:
    body = await sent(server, "anthropic", **ON, base_model="claude-opus-4-5", reasoning_effort="low")
    assert body["output_config"] == {"effort": "low", "format": {"type": "json_schema", "schema": CLOSED}}


@pytest.mark.parametrize("backend", ["anthropic", "openai", "litellm", "responses"])
async def test_where_it_is_off_nothing_changes(server: RunningModelServer, backend: str) -> None:
    plain = await sent(server, backend, replace(REQUEST, output_schema=None))
    for wish in ("off", "auto"):  # the table knows none of these models
        body = await sent(server, backend, strict_tools=wish, structured_output=wish)
        assert body == plain
    assert not any(name in str(plain) for name in ("'strict': True", "response_format", "output_config"))


@pytest.mark.parametrize(
    ("backend", "base_model", "is_strict"),
    [
        ("anthropic", "claude-sonnet-4-5", True),
        ("anthropic", "claude-3-haiku-20240307", False),
        ("openai", "gpt-4o", True),
        ("openai", "gpt-4-turbo", False),
        ("openai", "deepseek-chat", False),
        ("openai", "claude-sonnet-4-5", False),
        ("litellm", "gpt-5", True),
    ],
)
async def test_auto_asks_the_table(server: RunningModelServer, backend: str, base_model: str, is_strict: bool) -> None:
    body = await sent(server, backend, base_model=base_model, strict_tools="auto")
    tool = body["tools"][0]
    assert tool.get("function", tool).get("strict", False) is is_strict


@pytest.mark.parametrize("backend", ["anthropic", "openai", "litellm"])
async def test_a_refusal_is_asked_around_once_and_remembered(server: RunningModelServer, backend: str) -> None:
    async with client(server, backend, **ON) as llm:
        server.plan({"kind": "bad_request", "text": "Unsupported parameter: strict"})
        for _ in range(2):
            assert (await llm.complete(REQUEST)).tool_calls
    asked = [("'strict': True" in str(found["body"]), found["outcome"]) for found in server.requests()]
    assert asked == [(True, "refused"), (False, "answered"), (False, "answered")]


async def test_malformed_request_of_any_form_leaves_it_strict(server: RunningModelServer) -> None:
    async with client(server, "openai", **ON) as llm:
        server.plan({"kind": "bad_request", "times": 2})
        with pytest.raises(BadRequestError):
            await llm.complete(REQUEST)
        await llm.complete(REQUEST)
    assert ["'strict': True" in str(found["body"]) for found in server.requests()] == [True, False, True]


async def test_another_failure_is_not_asked_around(server: RunningModelServer) -> None:
    async with client(server, "openai", **ON) as llm:
        server.plan({"kind": "context_overflow"})
        with pytest.raises(Exception, match="context"):
            await llm.complete(REQUEST)
    assert len(server.requests()) == 1


async def test_a_batched_call_is_not_strict(server: RunningModelServer) -> None:
    taken: list[bytes] = []

    async def carry(body: bytes) -> Any:
        taken.append(body)
        raise BadRequestError("later")

    async with client(server, "openai", **ON) as llm:
        with pytest.raises(BadRequestError):
            await llm.complete(replace(REQUEST, carry=carry))
    assert len(taken) == 1
    assert b'"strict":true' not in taken[0]


@pytest.mark.parametrize("wish", ["on", "off"])
async def test_a_reply_that_is_the_output_finishes_the_conversation(hands: Hands, wish: str) -> None:
    models = Models({"LLM_STRUCTURED_OUTPUT": wish}, SystemClock(), is_open=True)
    hands.services = Services(hands.store, hands.log, hands.owners, models)
    agent = hands.agent(output=OutputSpec(json_schema=SCHEMA))
    last = {"tool_calls": [{"name": "finish", "arguments": {"message": "", "output": {"a": "y", "b": None}}}]}
    await hands.begin({"text": '{"a": "x", "b": null}'}, last, agent=agent)
    loop = await hands.go()
    is_on = wish == "on"
    assert loop.state.lifecycle.agent_state is (AgentState.FINISHED if is_on else AgentState.AWAITING_USER_INPUT)
    await hands.say("Once more.")
    await hands.go()
    events = await hands.events()
    assert find_violations(events, conversation_id=CID, is_strict=True) == []
    assert fold_status(events).state is AgentState.FINISHED
    found = replay(events)
    assert found.divergence is None, found.divergence.to_diff()
    outputs = [event.outputs for event in events if isinstance(event, AgentFinishAction)]
    assert outputs == [{"a": "x"}] * is_on + [{"a": "y"}]
