"""Requests that wait for a conversation: they are bounded, nothing begins for which there is no room, and none outlives
its caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect

from deckhands.server.streams import EventStream
from tests.polling import until
from tests.server_parts import Served, served

CHAT = {"model": "CodeActAgent", "messages": [{"role": "user", "content": "do it"}]}
MESSAGE = {"messageId": "m-1", "role": "ROLE_USER", "parts": [{"text": "do it"}]}
A2A = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": MESSAGE}}
MCP_CALL = {"name": "start_task", "arguments": {"task": "do it", "wait_seconds": 3600}}
MCP = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": MCP_CALL}
IN_THE_ANSWER = ("/a2a", "/mcp")
"""Refusals of these come with the status 200."""
WAITING: dict[str, dict[str, Any]] = {
    "/runs/wait?timeout_seconds=3600": {"task": "do it"},
    "/v1/chat/completions?timeout_seconds=3600": CHAT,
    "/v1/responses?timeout_seconds=3600": {"model": "CodeActAgent", "input": "do it"},
    "/a2a": A2A,
    "/mcp": MCP,
}
STREAMING: dict[str, dict[str, Any]] = {
    "/runs/stream": {"task": "do it"},
    "/v1/chat/completions": CHAT | {"stream": True},
    "/a2a": A2A | {"method": "SendStreamingMessage"},
}


@pytest.fixture
async def server(tmp_path: Path, programs: dict[str, str]) -> AsyncIterator[Served]:
    async with served(tmp_path / "log", programs, max_streams=1) as found:
        yield found


async def begun(server: Served) -> int:
    return len(await server.client.recent())


async def test_waiting_requests_are_bounded_and_end_with_their_callers(server: Served) -> None:
    streams = server.gateway.streams
    async with server.as_(await server.token("*")) as client:
        for number, (path, body) in enumerate(WAITING.items(), 1):
            waiting = asyncio.create_task(client.post(path, json=body, headers={"Idempotency-Key": path}))
            await until(lambda: len(streams) == 1, what="a request that waits")
            for other, same in (*WAITING.items(), *STREAMING.items()):
                refused = await client.post(other, json=same)
                assert "too_many_streams" in refused.text, (other, refused.text)
                assert refused.status_code == (200 if other in IN_THE_ANSWER else 503), other
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await until(lambda: not streams, what="the end of what waited for nobody")
            assert await begun(server) == number


async def test_one_key_cannot_take_the_streams_of_others(tmp_path: Path, programs: dict[str, str]) -> None:
    async with served(tmp_path / "log", programs, max_streams=4) as server:
        cid = await server.client.submit("do it")
        greedy, modest = await server.token("*", streams=2), await server.token("*", streams=2)
        url = f"ws://127.0.0.1:{server.port}/conversations/{cid}/ws"
        headers = {"Authorization": f"Bearer {greedy}"}
        async with (
            server.as_(greedy) as client,
            connect(url, additional_headers=headers) as socket,
            client.stream("GET", f"/conversations/{cid}/stream") as held,
        ):
            await socket.recv()
            lines = held.aiter_lines()
            await anext(lines)
            async with connect(url, additional_headers=headers) as refused_socket:
                await refused_socket.wait_closed()
                assert (refused_socket.close_code, refused_socket.close_reason) == (1013, "too_many_streams_of_key")
            paths = {f"/conversations/{cid}/stream": None, **WAITING, **STREAMING}
            for path, body in paths.items():
                refused = await (client.get(path) if body is None else client.post(path, json=body))
                assert "too_many_streams_of_key" in refused.text, path
                assert refused.status_code == (200 if path in IN_THE_ANSWER else 429), path
                assert "`streams`" in refused.text, path
            async with server.as_(modest) as other, other.stream("GET", f"/conversations/{cid}/stream") as open_one:
                assert open_one.status_code == 200
        await until(lambda: not server.gateway.streams, what="the end of all streams")
        async with server.as_(greedy) as client, client.stream("GET", f"/conversations/{cid}/stream") as again:
            assert again.status_code == 200


@pytest.mark.parametrize("path", [*WAITING, *STREAMING])
async def test_burst_takes_no_more_places_than_there_are(server: Served, path: str) -> None:
    body = WAITING.get(path) or STREAMING[path]
    async with server.as_(await server.token("*")) as client:
        burst = [asyncio.create_task(client.post(path, json=body)) for _ in range(8)]
        await until(lambda: len([one for one in burst if one.done()]) == 7, what="refusals of all but one")
        ended = [one for one in burst if one.done()]
        assert all("too_many_streams" in one.result().text for one in ended)
        assert len(server.gateway.streams) == 1
        for one in burst:
            one.cancel()
        await asyncio.gather(*burst, return_exceptions=True)
    await until(lambda: not server.gateway.streams, what="the end of what waited for nobody")
    assert await begun(server) == 1


async def test_a_reader_that_leaves_leaves_no_task_behind(server: Served) -> None:
    cid = await server.client.submit("do it")
    reader = await server.gateway.authenticate(await server.token("*"))

    async def read() -> None:
        async for _ in EventStream(server.gateway, reader, cid).batches():
            pass

    before = len(asyncio.all_tasks())
    for _ in range(5):
        reading = asyncio.create_task(read())
        await until(lambda: bool(server.gateway.streams), what="a reader")
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: len(asyncio.all_tasks()) <= before, what="the end of all tasks")
