"""A server that is killed under its readers: each resumes, and has every event once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from broker.store.embedded import EmbeddedValkey
from broker.store.store import open_store
from deckhands.client.client import Client
from tests.polling import unhurried, until

LIMIT = 60.0
MESSAGES = 30


@contextlib.asynccontextmanager
async def server(url: str, home: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """`deckhands serve`, once it answers; killed at the end."""
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "deckhands", "serve", "--port", str(port)),
        env={"PATH": os.environ["PATH"], "DECKHANDS_URL": url, "DECKHANDS_HOME": str(home)},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx2.AsyncClient() as client:

            async def answers() -> bool:
                with contextlib.suppress(httpx2.HTTPError):
                    return (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
                return False

            await until(answers, limit=LIMIT, what="server")
        yield running
    finally:
        running.kill()
        await running.wait()


async def read(port: int, conversation_id: str, seen: list[int], last: asyncio.Future[int]) -> None:
    """Read events into `seen`, and resume behind the latest one until the last is there."""
    while not (last.done() and seen and seen[-1] >= last.result()):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            after = seen[-1] if seen else 0
            path = f"/conversations/{conversation_id}/stream"
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: {after}\r\n\r\n".encode())
            while line := await reader.readline():
                if line.startswith(b"id: "):
                    seen.append(int(line[4:]))
                    if last.done() and seen[-1] >= last.result():
                        break
            writer.close()
        await asyncio.sleep(0)  # another connection, at once


@pytest.mark.parametrize("readers", [10, pytest.param(500, marks=pytest.mark.slow)])
async def test_every_reader_ends_with_the_whole_sequence_once(readers: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    valkey = EmbeddedValkey(tmp_path / "valkey")
    await valkey.start()
    client = Client(await open_store(valkey.url))
    try:
        cid = await client.submit("do it")
        last: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        logs: list[list[int]] = [[] for _ in range(readers)]
        tasks: list[asyncio.Task[None]] = []
        for part in range(3):
            async with server(valkey.url, tmp_path / "home", port):
                tasks = tasks or [asyncio.create_task(read(port, cid, seen, last)) for seen in logs]
                for _ in range(MESSAGES):
                    await client.send_message(cid, "more")
                so_far = await client.log.last_id(cid)
                await until(lambda: any(seen[-1:] == [so_far] for seen in logs), limit=LIMIT, what="events")  # noqa: B023
                if part == 2:
                    last.set_result(so_far)
                    await client.send_message(cid, "the last")  # who had all of them hears of one more
                    await asyncio.wait_for(asyncio.gather(*tasks), unhurried(LIMIT))
        assert all(seen[: last.result()] == list(range(1, last.result() + 1)) for seen in logs)
    finally:
        await client.aclose()
        await valkey.stop()
