"""A gateway with its workers beside OpenHands' agent server: the same conversations over HTTP, a model that is near.

Both are asked to begin a conversation with a task, and followed by WebSocket. The agent thinks so many times, and then
it finishes. Both ask the same model server by OpenAI's protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from websockets.asyncio.client import connect

from benchmarks.bench import Bench, spread
from benchmarks.cluster import model_environment, model_server_arguments, running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.gateway import gateway_of
from benchmarks.machine import resident_kib
from benchmarks.noop_tool import POOL
from benchmarks.peer.sdk import PYTHON
from broker.runtime.child import ChildProcess
from tests.model_server.running_server import RunningModelServer

READY_SECONDS = 300.0
LIMIT_SECONDS = 600.0
THOUGHTS = 10
BUSY = 429
BUSY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Found:
    """What one side has shown.

    Attributes:
        first: from the request until the first event has arrived, for each conversation that ran alone.
        events_a_second: of all conversations that ran at once, as the server sends them.
        events: of one of them, on average.
        kib: resident memory of its processes that each of them has left.
    """

    first: list[float]
    events_a_second: float
    events: float
    kib: float


@dataclass(frozen=True, slots=True)
class Side:
    """How a server is spoken to.

    Attributes:
        begin: where a conversation is begun; `body`: with what.
        stream: where it is followed; `{}` is its id.
        headers: of every request.
        is_last: whether a message of the stream is the end.
    """

    port: int
    pids: Sequence[int]
    begin: str
    body: dict[str, Any]
    id_field: str
    stream: str
    is_last: Callable[[dict[str, Any]], bool]
    headers: Mapping[str, str] = field(default_factory=dict)


async def measure(bench: Bench) -> Result:
    """Run both sides, one after the other."""
    alone, together = bench.choose(smoke=1, short=10, full=30), bench.choose(smoke=2, short=20, full=50)
    script = bench.directory / "thoughts.json"
    script.write_text(json.dumps({"turns": [*map(_thought, range(THOUGHTS)), {"tool_calls": [_call("finish")]}]}))
    server = RunningModelServer(model_server_arguments(script, latency_seconds=0))
    try:
        async with _ours(bench, server.url) as side:
            ours = await _run(side, alone, together)
        theirs = None
        if bench.sdk is not None:
            async with _theirs(bench, server.url) as side:
                theirs = await _run(side, alone, together)
    finally:
        server.stop()
    first = spread(theirs.first if theirs else [], scale=1_000)
    figures = [
        Figure("from the request to the first event", "ms", Spread.of(ours.first, scale=1_000), None, first),
        Figure(
            "time of an event, all at once",
            "ms",
            Spread.of([1_000 / ours.events_a_second]),
            None,
            Spread.of([1_000 / theirs.events_a_second]) if theirs else None,
        ),
        Figure(
            "memory that a conversation leaves",
            "KiB",
            Spread.of([ours.kib]),
            None,
            Spread.of([theirs.kib]) if theirs else None,
        ),
    ]
    note = (
        f"{alone} conversations in turn, then {together} at once, {THOUGHTS} thoughts and an end each. Ours: "
        f"gateway, controller worker, no-op tool and store together, {ours.events_a_second:.0f} events a second. "
    )
    note += f"A conversation has {ours.events:.0f} messages here"
    note += f", and {theirs.events:.0f} there, at {theirs.events_a_second:.0f} a second." if theirs else "."
    return Result("Servers side by side", figures, note)


async def _run(side: Side, alone: int, together: int) -> Found:
    async with httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{side.port}", headers=side.headers, timeout=LIMIT_SECONDS
    ) as client:
        await _converse(side, client)  # loads what is loaded late
        first = [(await _converse(side, client))[0] for _ in range(alone)]
        memory, began = sum(map(resident_kib, side.pids)), time.perf_counter()
        done = await asyncio.gather(*(_converse(side, client) for _ in range(together)))
        seconds = time.perf_counter() - began
        kib = (sum(map(resident_kib, side.pids)) - memory) / together
    events = sum(count for _, count in done)
    return Found(first, events / seconds, events / together, kib)


async def _converse(side: Side, client: httpx2.AsyncClient) -> tuple[float, int]:
    """Begin a conversation and follow it to its end; returns the time to its first event, and their number."""
    began, count, first = time.perf_counter(), 0, 0.0
    while (answer := await client.post(side.begin, json=side.body)).status_code == BUSY:
        await asyncio.sleep(BUSY_SECONDS)  # as many run as the server lets run
    assert answer.status_code in (200, 201), answer.text[:500]
    place = side.stream.format(answer.json()[side.id_field])
    async with (
        asyncio.timeout(LIMIT_SECONDS),
        connect(
            f"ws://localhost:{side.port}{place}",
            additional_headers=side.headers,
            max_size=None,
            open_timeout=LIMIT_SECONDS,
        ) as stream,
    ):
        async for message in stream:
            first = first or time.perf_counter() - began
            count += 1
            if side.is_last(json.loads(message)):
                break
    return first, count


@contextlib.asynccontextmanager
async def _ours(bench: Bench, url: str) -> AsyncIterator[Side]:
    async with running_cluster(bench.directory / "ours") as cluster, gateway_of(cluster) as (port, gateway, key):
        controller = await cluster.start_controller(**model_environment("openai", url))
        pids = (gateway, controller, await cluster.start_noop_tool(), await cluster.store_pid())
        body = {"task": "Do it.", "workspace": {"pool": POOL}}
        stream = "/conversations/{}/ws?until=settled"
        yield Side(
            *(port, pids, "/conversations", body, "conversation_id", stream),
            is_last=lambda it: it["type"] == "end",
            headers={"Authorization": f"Bearer {key}"},
        )


@contextlib.asynccontextmanager
async def _theirs(bench: Bench, url: str) -> AsyncIterator[Side]:
    folder = bench.directory / "theirs"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    settings = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LOG_LEVEL": "ERROR",
        "OH_CONVERSATIONS_PATH": str(folder / "conversations"),
        "OH_ENABLE_VSCODE": "false",
        "OH_ENABLE_VNC": "false",
    }
    program = shutil.which("sh") or "sh"
    start = f"cd {folder} && exec {PYTHON} -m openhands.agent_server --port {port}"
    child = ChildProcess.start([program, "-c", start], log=folder / "log", env=settings)
    try:
        async with asyncio.timeout(READY_SECONDS), httpx2.AsyncClient() as client:
            while True:
                assert child.exit_status is None, Path(folder / "log").read_text()[-500:]
                with contextlib.suppress(httpx2.HTTPError):
                    if (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200:
                        break
                await asyncio.sleep(0.2)
        body = {
            "agent": {"kind": "Agent", "llm": _llm(url), "tools": []},
            "workspace": {"kind": "LocalWorkspace", "working_dir": str(folder / "work")},
            "initial_message": {"role": "user", "content": [{"type": "text", "text": "Do it."}], "run": True},
        }
        stream = "/sockets/events/{}?resend_mode=all"
        yield Side(port, (child.pid,), "/api/conversations", body, "id", stream, _is_their_end)
    finally:
        await child.stop(grace_seconds=20)


def _llm(url: str) -> dict[str, Any]:
    return {"model": "openai/scripted", "base_url": f"{url}/v1", "api_key": "none", "usage_id": "agent"}


def _is_their_end(message: dict[str, Any]) -> bool:
    is_about_status = message.get("kind") == "ConversationStateUpdateEvent" and message.get("key") == "execution_status"
    assert not (is_about_status and message["value"] in ("error", "stuck")), message
    return is_about_status and message["value"] == "finished"


def _call(name: str, **arguments: str) -> dict[str, Any]:
    return {"name": name, "arguments": arguments or {"message": "Done."}}


def _thought(number: int) -> dict[str, Any]:
    return {"text": f"Step {number}.", "tool_calls": [_call("think", thought=f"Thought {number}.")]}
