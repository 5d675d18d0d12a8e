"""Chat completions and responses word by word, with OpenAI's own client, while what they come from is killed."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from deckhands.server.auth.api_keys import ApiKeys
from tests.faults.harness import FaultCluster
from tests.faults.server_process import free_port, server
from tests.integration.command_line import run_command
from tests.model_server.running_server import RunningModelServer
from tests.turns import finish

pytest_plugins = ("tests.model_server.fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

THOUGHT = "First I look around, " + " ".join(f"place-{number}" for number in range(60)) + "."
ANSWER = "All is done:\n" + "\n".join(f'- "{number}" \\ 你' for number in range(60))
NEXT = " ".join(f"again-{number}" for number in range(60))
USERS: Any = [{"role": "user", "content": "do it"}]


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory, shared_model_server: Callable[..., RunningModelServer]
) -> RunningModelServer:
    turns = [{**run_command("echo one"), "text": THOUGHT}, {**finish(ANSWER), "text": ""}, {**finish(NEXT), "text": ""}]
    script = tmp_path_factory.mktemp("models") / "m.json"
    script.write_text(json.dumps({"turns": turns}))
    return shared_model_server("--script", str(script))


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(tmp_path: Path, models: RunningModelServer) -> AsyncIterator[FaultCluster]:
    models.clear()
    async with FaultCluster(tmp_path).running() as found:
        found.start_controller(**asking(models))
        found.start_tool()
        yield found


def asking(models: RunningModelServer) -> dict[str, str]:
    return {"LLM_MODEL": "openai/gpt-4o", "LLM_BASE_URL": f"{models.url}/v1", "LLM_API_KEY": "k"}


async def token(cluster: FaultCluster) -> str:
    keys = ApiKeys(cluster.client.store)
    return (await keys.add("test", tenant="acme", scopes=["read", "write"]))[1]


def client(port: int, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)


def words_of(chunk: Any) -> str:
    return "".join(choice.delta.content or "" for choice in chunk.choices)


async def replies(cluster: FaultCluster) -> int:
    (row,) = await cluster.client.recent()
    return sum(event.kind == "model.reply" for event in await cluster.client.events(row.conversation_id))


async def completion(chat: openai.AsyncOpenAI) -> AsyncIterator[str]:
    """Yield what a chat completion says, piece by piece."""
    async for chunk in await chat.chat.completions.create(model="CodeActAgent", messages=USERS, stream=True):
        yield words_of(chunk)


async def response(chat: openai.AsyncOpenAI) -> AsyncIterator[str]:
    """Yield what a response says, piece by piece, and make sure that it ends with the same."""
    said = done = ""
    async with chat.responses.stream(model="CodeActAgent", input="do it") as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                said += event.delta
                assert event.snapshot == said
                yield event.delta
            elif event.type == "response.output_text.done":
                done += event.text
        assert (await stream.get_final_response()).output_text == done == said


@pytest.mark.parametrize("asked", [completion, response])
async def test_streamed_words_come_once_despite_a_killed_controller(
    cluster: FaultCluster,
    models: RunningModelServer,
    tmp_path: Path,
    asked: Callable[[openai.AsyncOpenAI], AsyncIterator[str]],
) -> None:
    models.plan({"kind": "hang_body", "turn": 0}, {"kind": "hang_body", "turn": 1})
    port, secret, seen = free_port(), await token(cluster), ""
    killed: list[tuple[int, str]] = []
    async with server(cluster.store.url, tmp_path / "home", port), client(port, secret) as chat:
        async for said in asked(chat):
            seen += said
            behind = len(seen) - len(THOUGHT)
            if said and (len(killed) == 0 or (len(killed) == 1 and behind > 10)):
                killed.append((await replies(cluster), seen))
                cluster.kill(f"c{len(killed)}" if len(killed) == 1 else "c2")
                cluster.start_controller(f"c{len(killed) + 1}", **asking(models))
    assert seen == f"{THOUGHT}\n\n{ANSWER}"
    assert [count for count, _ in killed] == [0, 1]  # the words had come before the reply that they are of
    assert [request["fault"] for request in models.requests()] == ["hang_body", None, "hang_body", None]


async def test_repeated_request_after_a_killed_gateway_has_one_answer(
    cluster: FaultCluster, models: RunningModelServer, tmp_path: Path
) -> None:
    models.plan({"kind": "drip", "turn": 0, "interval_seconds": 0.001})
    port, secret, first, again = free_port(), await token(cluster), "", ""
    key = {"Idempotency-Key": "one"}
    async with server(cluster.store.url, tmp_path / "home", port) as running, client(port, secret) as chat:
        create = chat.chat.completions.create
        stream = await create(model="CodeActAgent", messages=USERS, stream=True, extra_headers=key)
        with contextlib.suppress(Exception):  # the connection is cut off
            async for chunk in stream:
                first += words_of(chunk)
                if first and running.returncode is None:
                    running.kill()
        assert await running.wait() == -signal.SIGKILL
    async with server(cluster.store.url, tmp_path / "home", port), client(port, secret) as chat:
        create = chat.chat.completions.create
        stream = await create(model="CodeActAgent", messages=USERS, stream=True, extra_headers=key)
        async for chunk in stream:
            again += words_of(chunk)
        whole = await create(
            model="CodeActAgent", messages=USERS, stream=True, extra_headers=key, extra_query={"deltas": "false"}
        )
        answer = "".join([words_of(chunk) async for chunk in whole])
        (row,) = await cluster.client.recent()
        metadata = {"conversation_id": row.conversation_id}
        stream = await create(model="CodeActAgent", messages=USERS, metadata=metadata, stream=True)
        further = "".join([words_of(chunk) async for chunk in stream])
    assert again == f"{THOUGHT}\n\n{ANSWER}"
    assert first
    assert again.startswith(first)
    assert answer == ANSWER
    assert further == NEXT
    assert [each.conversation_id for each in await cluster.client.recent()] == [row.conversation_id]
