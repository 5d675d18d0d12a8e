"""Models whose servers accept and never answer, and turns that a provider pauses while a controller worker is killed.

The blocks of a paused turn return to Claude as they were, in a fork and at another profile, and to no other model."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.contract.events import AgentSpec, LLMSpec, ModelReply, TokenUsage
from broker.contract.specs import WorkspaceSpec
from controller_worker.providers.llm import ModelRequest
from tests.faults.harness import FaultCluster
from tests.integration.recorded_wires import Exchange, RecordedServer
from tests.polling import unhurried, until
from tests.turns import finish

TABLE = """
[llm]
model = "{good}"
[llm.openai]
model = "openai/x"
base_url = "{url}/v1"
api_key = "k"
[llm.anthropic]
model = "anthropic/claude-sonnet-4-5"
base_url = "{url}"
api_key = "k"
[llm.litellm]
model = "openai/x"
base_url = "{url}/v1"
backend = "litellm"
api_key = "k"
[llm.routed]
router = {{kind = "class", path = "{module}:BlockingRouter", choices = ["openai"]}}
"""
BLOCKED = ("openai", "anthropic", "litellm") * 2 + ("routed",) * 3


class BlockingRouter:
    """A router of the operator's that waits for a server while it is made."""

    def __init__(self) -> None:
        with socket.create_connection((os.environ["SILENT_HOST"], int(os.environ["SILENT_PORT"]))) as client:
            client.sendall(b"made")
            client.recv(1)

    def select_llm(self, _: ModelRequest) -> str:
        return "openai"


async def test_blocked_calls_hold_up_nothing_and_are_cancelled(tmp_path: Path) -> None:
    asked = 0

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.read(1)
        asked += 1
        while await reader.read(100_000):  # until the client has had enough
            pass
        writer.close()

    async with (
        await asyncio.start_server(keep_silent, "127.0.0.1", 0) as server,
        FaultCluster(tmp_path / "cluster").running() as cluster,
    ):
        host, port = server.sockets[0].getsockname()
        table = tmp_path / "models.toml"
        table.write_text(TABLE.format(good=cluster.script(finish()), url=f"http://{host}:{port}", module=__name__))
        (cluster.root / "work").mkdir()
        worker = cluster.start_controller(
            LLM_CONFIG=str(table), DECKHANDS_ANY_MODEL="", SILENT_HOST=host, SILENT_PORT=str(port)
        )
        client = cluster.client
        blocked = [await client.submit("do it", model=model) for model in BLOCKED]
        await until(lambda: asked == 7, limit=120.0, what="six calls and the making of one router")
        others = [await client.submit("do it") for _ in range(5)]
        await cluster.settle(others)
        assert {(await client.row(other)).state for other in others} == {"finished"}
        assert {(await client.row(each)).state for each in blocked} == {"running"}
        for each in blocked:
            await client.cancel(each)
        await cluster.settle(blocked)
        assert {(await client.row(each)).state for each in blocked} == {"stopped"}
        again = await client.submit("do it")
        await cluster.settle([again])
        worker.terminate()
        assert await cluster.until_ended("c1", limit=60.0) == 0


PATH = "/v1/messages"
SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "a"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}
FINISH = {"type": "tool_use", "id": "t1", "name": "finish", "input": {"message": "Done."}}
PROFILES = """
[llm.first]
model = "anthropic/claude-sonnet-4-5"
base_url = "{url}"
api_key = "sk-first"
fallbacks = ["second"]

[llm.second]
model = "anthropic/claude-opus-4-5"
base_url = "{url}"
api_key = "sk-second"
"""


@pytest.fixture
def provider() -> Iterator[RecordedServer]:
    server = RecordedServer()
    yield server
    server.stop()


def part(*blocks: dict[str, Any], stop: str) -> Exchange:
    usage = {"input_tokens": 3_000, "output_tokens": 40}
    reply = {"id": "msg_1", "model": "claude-sonnet-4-5", "content": list(blocks), "stop_reason": stop, "usage": usage}
    return Exchange(path=PATH, request={}, reply=reply)


async def test_killed_between_the_parts_of_a_turn(cluster: FaultCluster, provider: RecordedServer) -> None:
    paused, ended = part(SEARCH, stop="pause_turn"), part(FOUND, FINISH, stop="tool_use")
    refused = Exchange(path=PATH, request={}, status=401, reply={"error": {"message": "invalid x-api-key"}})
    silence = Exchange(path=PATH, request={}, stream=(": nothing yet",), connection="held_open")
    again = part(FINISH | {"id": "t2"}, stop="tool_use")
    provider.prepare([paused, silence, paused, ended, again, refused, again], is_streamed=True)
    profiles = cluster.root / "models.toml"
    profiles.write_text(PROFILES.format(url=provider.url))
    settings = {"LLM_CONFIG": str(profiles)}
    cluster.start_tool()
    cluster.start_controller("victim", **settings)
    folder = cluster.root / "work" / "w"
    folder.mkdir(parents=True, exist_ok=True)
    conversation_id = await cluster.client.submit(
        "do it", agent=AgentSpec(llm=LLMSpec(model="first")), workspace=WorkspaceSpec(path=str(folder), sandbox="none")
    )
    await cluster.until(lambda: len(provider.seen) == 2, limit=unhurried(60.0), what="the second part")
    cluster.kill("victim")
    cluster.start_controller("survivor", **settings)
    await cluster.settle([conversation_id], limit=unhurried(60.0))

    events = await cluster.client.events(conversation_id)
    (reply,) = [event for event in events if isinstance(event, ModelReply)]
    assert [call.name for call in reply.tool_calls] == ["finish"]
    assert reply.usage == TokenUsage(prompt_tokens=6_000, completion_tokens=80)
    blocks = [block["block"] for block in reply.thinking_blocks]
    assert blocks == [SEARCH, FOUND, {"type": "tool_use", "id": "t1"}]
    bodies = [json.dumps(body["messages"]) for _, _, body in provider.seen]
    assert bodies[0] == bodies[2]  # the turn started again
    assert bodies[1] == bodies[3]
    assert [body["messages"][-1]["content"] for _, _, body in provider.seen[1::2]] == [[SEARCH]] * 2

    fork_id = await cluster.client.fork(conversation_id)
    await cluster.client.send_message(fork_id, "Thanks.")
    await cluster.until(lambda: len(provider.seen) == 5, limit=unhurried(60.0), what="the fork's question")
    await cluster.settle([fork_id], limit=unhurried(60.0))
    await cluster.client.send_message(conversation_id, "Thanks.")
    await cluster.until(lambda: len(provider.seen) == 7, limit=unhurried(60.0), what="the fallback's question")
    await cluster.settle([conversation_id], limit=unhurried(60.0))
    for _, _, body in provider.seen[4:]:
        (written,) = [message["content"] for message in body["messages"] if message["role"] == "assistant"]
        assert written == [SEARCH, FOUND, FINISH]
    assert [body["model"] for _, _, body in provider.seen[4:]] == ["claude-sonnet-4-5"] * 2 + ["claude-opus-4-5"]
