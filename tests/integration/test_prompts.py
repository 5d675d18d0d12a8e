"""Prompts made again from a log, beside those that a model server has received from a real controller worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from broker.contract.events import AgentSpec, LLMSpec, ModelReply
from broker.contract.specs import Tenancy
from tests.integration.command_line import deckhands, environment
from tests.model_server.running_server import RunningModelServer
from tests.served_stores import environment_with, worker
from tests.server_parts import Served, served

pytest_plugins = ("tests.model_server.fixtures",)
MODEL = "openai/mine"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path / "log", environment_with(tmp_path)) as found:
        yield found


def texts_in(sent: list[dict[str, Any]]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """The messages of a request in OpenAI's form: role, text, calls."""
    found = []
    for message in sent:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls") or ()]
        found.append((message["role"], text, calls))
    return found


def texts_of(prompt: dict[str, Any]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    return [
        (one["role"], "".join(one["content"]), [(call["name"], call["arguments"]) for call in one["tool_calls"]])
        for one in prompt["messages"]
    ]


async def test_prompt_is_the_one_that_the_model_received(
    server: Served, model_server: Callable[..., RunningModelServer], tmp_path: Path
) -> None:
    model = model_server("--builtin", "bash:2")
    variables = {"LLM_BASE_URL": f"{model.url}/v1", "LLM_API_KEY": "k", "LLM_MODEL": MODEL, "LLM_BACKEND": "openai"}
    variables["LLM_NATIVE_TOOL_CALLING"] = "true"
    environment = server.environment(tmp_path / "home", **variables)
    async with AsyncExitStack() as stack:
        for module in ("controller_worker", "tool_worker"):
            await stack.enter_async_context(worker(module, environment, server.log))
        await server.working()
        agent = AgentSpec(llm=LLMSpec(model=MODEL))
        cid = await server.client.submit("Count the files", agent=agent, tenancy=Tenancy(tenant="acme"))
        await server.client.wait_until_settled(cid, timeout_seconds=120.0)
    replies = [event for event in await server.client.events(cid) if isinstance(event, ModelReply)]
    requests = [texts_in(request["body"]["messages"]) for request in model.requests()]
    assert len(replies) == len(requests) >= 3
    async with server.as_(await server.token("acme")) as client:
        for reply, sent in zip(replies, requests, strict=True):
            answer = await client.get(f"/conversations/{cid}/prompt", params={"at": reply.id - 1})
            assert answer.status_code == 200, answer.text
            assert texts_of(answer.json()) == sent
            assert answer.json()["model"] == MODEL
            assert "execute_bash" in answer.json()["tools"]


async def test_prompt_is_refused_to_others_and_where_there_is_none(server: Served, tmp_path: Path) -> None:
    cid = await server.client.submit("Count\x1b[31m the files", tenancy=Tenancy(tenant="acme"))
    last = await server.client.log.load_last_id(cid)
    async with server.as_(await server.token("acme")) as client:
        found = (await client.get(f"/conversations/{cid}/prompt?at={last}")).json()
        assert found["messages"][-1]["role"] == "user"
        assert "Count" in found["messages"][-1]["content"][0]
        for at, status in ((last + 1, 404), (0, 422), ("x", 422)):
            assert (await client.get(f"/conversations/{cid}/prompt?at={at}")).status_code == status
        with server.gateway.prompts.holding("acme"), server.gateway.prompts.holding("acme"):
            assert (await client.get(f"/conversations/{cid}/prompt?at={last}")).status_code == 429
    async with server.as_(await server.token("globex")) as client:
        assert (await client.get(f"/conversations/{cid}/prompt?at={last}")).status_code == 404
    env = environment(tmp_path / "home", DECKHANDS_URL=server.log.operator)
    done = await asyncio.to_thread(deckhands, "prompt", cid, env=env)
    assert done.code == 0, done.err
    assert "--- user" in done.out
    assert "\x1b" not in done.out
    missing = await asyncio.to_thread(deckhands, "prompt", f"{cid}@99", env=env)
    assert (missing.code, "there is no event 99" in missing.err) == (2, True)


async def test_prompt_of_a_program_with_its_own_is_refused(server: Served) -> None:
    cid = await server.client.submit("x", agent=AgentSpec(name="CodeActAgentSDK", llm=LLMSpec(model=MODEL)))
    last = await server.client.log.load_last_id(cid)
    async with server.as_(await server.token("*")) as client:
        answer = await client.get(f"/conversations/{cid}/prompt?at={last}")
    assert answer.status_code == 409
    assert "makes its prompts itself" in answer.json()["detail"]
