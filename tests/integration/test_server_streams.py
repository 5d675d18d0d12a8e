"""Streams and hostile requests: the events of readers across restarts, and the cost of bad input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from broker.contract.events import AgentSpec, LLMSpec
from broker.store.embedded import EmbeddedValkey
from broker.store.store import open_store
from deckhands.client.client import Client
from deckhands.server.gateway import Gateway, ServerOptions
from deckhands.server.serving import serve_in_loop
from deckhands.server.streams import EventStream
from tests.polling import unhurried, until
from tests.served_stores import worker
from tests.server_parts import Served, add_key, add_principal, served
from tests.unit.deckhands.sample_log import state

LIMIT = 30.0


@pytest.fixture
async def server(tmp_path: Path, programs: dict[str, str]) -> AsyncIterator[Served]:
    async with served(tmp_path / "log", programs, quiet_seconds=0.3, slow_seconds=0.5, head_seconds=0.5) as found:
        yield found


async def read_sse(url: str, path: str, *, after: int, last: int, headers: dict[str, str] | None = None) -> list[Any]:
    """The ids of events up to one, or up to the end of the stream, with its code as the last."""
    found: list[Any] = []
    async with (
        httpx2.AsyncClient(base_url=url, timeout=LIMIT) as client,
        client.stream("GET", path, headers={"Last-Event-ID": str(after), **(headers or {})}) as answer,
    ):
        name = ""
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                found.append(int(line[4:]))
            elif line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: ") and name:
                found.append(json.loads(line[6:]).get("code", name))
            if last in found:
                break
    return found


async def test_long_events_are_read_ahead_few_at_a_time(server: Served) -> None:
    cid = await server.client.submit("do it")
    await server.client.log.append(cid, [state("running", reason="x" * 30_000)] * 40)
    batches: list[list[int]] = []
    stream = EventStream(Gateway(server.client.store), await add_principal(server.client.store), cid)
    async with contextlib.aclosing(stream.batches()) as found, asyncio.timeout(unhurried(LIMIT)):
        async for batch in found:
            batches.append([item.id for item in batch])
            for _ in range(10):
                await server.client.log.load_last_id(cid)  # meanwhile, up to the read-ahead limit
            if batch and batch[-1].id >= 42:
                break
    ids = [event_id for batch in batches for event_id in batch]
    assert ids == list(range(1, len(ids) + 1))
    assert max(map(len, batches[1:])) <= 2


async def test_a_page_of_long_events_ends_early_and_leads_on(server: Served) -> None:
    cid = await server.client.submit("do it")
    await server.client.log.append(cid, [state("running", reason="x" * 30_000)] * 20)
    pages: list[list[int]] = []
    after: int | None = 0
    async with server.as_(await server.token("*")) as client:
        while after is not None:
            page = (await client.get(f"/conversations/{cid}/events?after={after}&limit=1000")).json()
            pages.append([event["id"] for event in page["events"]])
            after = page["next_after"]
    ids = [event_id for page in pages for event_id in page]
    assert ids == list(range(1, len(ids) + 1))
    assert len(ids) >= 22
    assert 3 <= len(pages) <= 4


async def test_reader_gets_each_event_once_through_restarts(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(tmp_path / "valkey", append_fsync="always")
    await valkey.start()
    store = await open_store(valkey.url, patience_seconds=60)
    client = Client(store)
    cid = await client.submit("do it")
    path = f"/conversations/{cid}/stream"
    login = {"Authorization": f"Bearer {await add_key(store)}"}
    seen: list[int] = []

    async def more() -> int:
        await client.send_message(cid, "more")
        return await client.log.load_last_id(cid)

    try:
        for _ in range(2):  # a server, and another one after it
            gateway = Gateway(await open_store(valkey.url, patience_seconds=60), options=ServerOptions(port=0))
            async with serve_in_loop(gateway) as port:
                url = f"http://127.0.0.1:{port}"
                last = await more()
                reading = asyncio.create_task(read_sse(url, path, after=len(seen), last=last + 2, headers=login))
                await more()
                await valkey.stop()
                await valkey.start()
                assert await more() == last + 2
                seen += await asyncio.wait_for(reading, unhurried(LIMIT))
                await until(lambda gateway=gateway: not gateway.streams, what="the end of the reader")
                following = asyncio.create_task(read_sse(url, path, after=last + 2, last=0, headers=login))
                await until(lambda gateway=gateway: gateway.streams, what="the next reader")
            assert (await following)[-1] == "server_stopping"
            await gateway.aclose()
        assert seen == list(range(1, await client.log.load_last_id(cid) + 1))
    finally:
        await client.aclose()
        await valkey.stop()


HOSTILE_BODIES = (
    (b'{"task": "\xff"}', 400, "malformed_json"),
    (b"[" * 100_000, 400, "malformed_json"),
    (b'{"a":' * 65 + b"1" + b"}" * 65, 400, "malformed_json"),
    (b'{"task": NaN}', 400, "malformed_json"),
    (b'{"task": 1e999}', 400, "malformed_json"),
    (b'{"task": ' + b"9" * 5_000 + b"}", 400, "malformed_json"),
    (b'{"task": "\\ud800"}', 400, "malformed_json"),
    (b'"' + b'\\"' * 200_000, 400, "malformed_json"),
    (b'{"task": "do it"', 400, "malformed_json"),
    (b'{"task": ""}', 422, "invalid_request"),
    (b'{"task": "x", "tusk": 1}', 422, "invalid_request"),
)
HOSTILE_PATHS = ("../x", "a/../../x", "%2e%2e/x", "a//b", "/etc/passwd", "a%00b", "a%0ab", "a\\b", "x" * 300)


async def test_hostile_input_gets_its_status_and_begins_nothing(server: Served) -> None:
    token = await server.token("*")
    async with server.as_(token) as client:
        for body, status, code in HOSTILE_BODIES:
            answer = await client.post("/conversations", content=body, headers={"Content-Type": "application/json"})
            assert (answer.status_code, answer.json()["code"]) == (status, code), body[:40]
        plain = await client.post("/conversations", content=b"{}", headers={"Content-Type": "text/plain"})
        assert plain.json()["code"] == "unsupported_media_type"
        traced = await client.request("TRACE", "/conversations", content=b"x")
        assert (traced.status_code, traced.json()["code"]) == (405, "method_not_allowed")
        assert traced.headers["allow"] == "GET, POST"
        many = await client.get("/conversations", params=[("label", "a=b")] * 51)
        assert (many.status_code, many.json()["code"]) == (400, "bad_query")
        unnamed = b"GET /conversations HTTP/1.1\r\nHost: [\r\n\r\n"
        assert await _status(server.port, unnamed) == 421
        assert (await client.get("/conversations")).json()["conversations"] == []
        login = f"Host: localhost\r\nAuthorization: Bearer {token}\r\n"
        head = f"POST /conversations HTTP/1.1\r\n{login}Content-Type: application/json\r\n".encode()
        assert await _status(server.port, head + f"Content-Length: {2**20 + 1}\r\n\r\n".encode()) == 413
        cid = await server.client.submit("do it")
        for path in HOSTILE_PATHS:
            raw = f"PUT /conversations/{cid}/files/{path} HTTP/1.1\r\n{login}Content-Length: 1\r\n\r\nx"
            assert await _status(server.port, raw.encode()) in (400, 404), path
        assert (await client.get(f"/conversations/{cid}/stream?after=99")).json()["code"] == "events_lost"


async def _status(port: int, request: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(unhurried(LIMIT)):
        line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return int(line.split()[1])


async def test_written_events_are_sent_at_once(server: Served) -> None:
    """Without this, the body of an answer waits 40 ms until the peer has acknowledged its head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readline()
    client = writer.get_extra_info("sockname")
    found = []
    for name in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name.name))) as each:
            if each.getpeername() == client:
                found.append(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    writer.close()
    assert len(found) == 1
    assert found[0] != 0


async def test_a_run_from_its_beginning_to_its_files(tmp_path: Path, programs: dict[str, str]) -> None:
    script = tmp_path / "script.json"
    turns = [
        {"tool_calls": [{"name": "execute_bash", "arguments": {"command": "mkdir d; echo one > d/one.txt"}}]},
        {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]},
    ]
    script.write_text(json.dumps({"turns": turns}))
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(served(tmp_path / "log", programs))
        environment = server.environment(tmp_path / "home")
        for module in ("controller_worker", "tool_worker"):
            await stack.enter_async_context(worker(module, environment, server.log))
        client = await stack.enter_async_context(server.as_(await server.token()))
        agent = AgentSpec(llm=LLMSpec(model=f"scripted/{script}")).model_dump(mode="json")
        ran = await client.post("/runs/wait?timeout_seconds=60", json={"task": "do it", "agent": agent})
        assert (ran.status_code, ran.json()["summary"]["message"]) == (200, "done"), ran.text
        files = f"{ran.headers['location']}/files"
        assert (await client.get(f"{files}/d/one.txt")).content == b"one\n"
        put = await client.put(f"{files}/d/two.txt", content=b"two\n")
        assert (put.status_code, (await client.get(f"{files}/d/two.txt")).content) == (201, b"two\n")
        assert (await client.get(f"{files}/d")).headers["content-type"] == "application/x-tar"
        assert (await client.get(f"{files}/none")).status_code == 404
        assert (await client.get("/ready")).json()["ready"] is True
        assert "CodeActAgent" in (await client.get("/agents")).json()["names"]
        names, last = [], {}
        async with client.stream("POST", "/runs/stream?deltas=true", json={"task": "do it", "agent": agent}) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("event: "):
                    names.append(line[7:])
                elif line.startswith("data: "):
                    last = json.loads(line[6:])
        assert names[-1] == "end"
        assert (last["reason"], last["summary"]["state"]) == ("settled", "finished")
