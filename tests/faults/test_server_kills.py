"""A server or a store that is killed under readers: each resumes, and has every event once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from broker.store.embedded import EmbeddedValkey
from broker.store.store import open_store
from deckhands.client.client import Client
from tests.faults.server_process import free_port, server
from tests.left_logs import verify_left_logs
from tests.polling import unhurried, until
from tests.server_parts import add_key

LIMIT = 60.0
MESSAGES = 10
CROWD = [10, pytest.param(500, marks=pytest.mark.soak)]


@dataclass
class Reader:
    """One that resumes behind its latest event until it has the last one; every third one by WebSocket.

    Attributes:
        seen: the ids of events, in the order of their arrival.
        connections: the number of its connections.
    """

    port: int
    conversation_id: str
    is_socket: bool
    key: str
    seen: list[int] = field(default_factory=list)
    connections: int = 0

    @property
    def latest(self) -> int:
        return self.seen[-1] if self.seen else 0

    async def read(self, last: asyncio.Future[int]) -> None:
        while not self._has(last):
            self.connections += 1
            with contextlib.suppress(OSError, EOFError, WebSocketException):
                await (self._follow_socket(last) if self.is_socket else self._follow(last))
            await asyncio.sleep(0)  # another connection, at once

    def _has(self, last: asyncio.Future[int]) -> bool:
        return last.done() and self.latest >= last.result()

    async def _follow(self, last: asyncio.Future[int]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"Host: localhost\r\nAuthorization: Bearer {self.key}\r\nLast-Event-ID: {self.latest}\r\n"
        writer.write(f"GET /conversations/{self.conversation_id}/stream HTTP/1.1\r\n{head}\r\n".encode())
        try:
            while not self._has(last) and (line := await reader.readline()):
                if line.startswith(b"id: ") and line.endswith(b"\n"):
                    self.seen.append(int(line[4:]))
        finally:
            writer.close()

    async def _follow_socket(self, last: asyncio.Future[int]) -> None:
        place = f"/conversations/{self.conversation_id}/ws?after={self.latest}"
        headers = {"Authorization": f"Bearer {self.key}"}
        async with connect(
            f"ws://localhost:{self.port}{place}", additional_headers=headers, open_timeout=unhurried(LIMIT)
        ) as socket:
            async for message in socket:
                found = json.loads(message)
                if found["type"] == "event":
                    self.seen.append(found["id"])
                if self._has(last):
                    return


@dataclass
class World:
    """A conversation with readers, and the store that it is in."""

    valkey: EmbeddedValkey
    client: Client
    conversation_id: str
    port: int
    readers: list[Reader]
    last: asyncio.Future[int]

    async def append(self, count: int) -> int:
        """Append messages, and return the id of the last event."""
        for _ in range(count):
            await self.client.send_message(self.conversation_id, "more")
        return await self.client.log.load_last_id(self.conversation_id)

    async def until_read(self, by: int, event_id: int) -> None:

        def have_it() -> bool:
            return sum(reader.latest >= event_id for reader in self.readers) >= by

        await until(have_it, limit=LIMIT, what=f"event {event_id} at {by} readers")

    async def finish(self, reading: asyncio.Future[list[None]]) -> None:
        """Let the readers come to the end, and check their events."""
        end = await self.append(1)
        self.last.set_result(end)
        await self.append(1)  # a reader with all of them gets one more
        await asyncio.wait_for(reading, unhurried(LIMIT))
        whole = list(range(1, end + 1))
        assert [number for number, reader in enumerate(self.readers) if reader.seen[:end] != whole] == []
        assert all(reader.seen[end:] in ([], [end + 1]) for reader in self.readers)


@contextlib.asynccontextmanager
async def world(folder: Path, readers: int) -> AsyncIterator[World]:
    valkey = EmbeddedValkey(folder / "valkey", append_fsync="always")
    await valkey.start()
    client = Client(await open_store(valkey.url, patience_seconds=LIMIT))
    cid, port = await client.submit("do it"), free_port()
    key = await add_key(client.store, requests_per_minute=1_000_000, streams=5_000)
    crowd = [Reader(port, cid, is_socket=number % 3 == 0, key=key) for number in range(readers)]
    try:
        yield World(valkey, client, cid, port, crowd, asyncio.get_running_loop().create_future())
        await verify_left_logs(client)
    finally:
        await client.aclose()
        await valkey.stop()


@pytest.mark.parametrize("readers", CROWD)
async def test_readers_get_the_whole_sequence_despite_killed_server(readers: int, tmp_path: Path) -> None:
    async with world(tmp_path, readers) as here:
        reading = None
        for part in range(3):
            async with server(here.valkey.url, tmp_path / "home", here.port):
                reading = reading or asyncio.gather(*(reader.read(here.last) for reader in here.readers))
                # While some have it and others do not, the server is killed; at last all of them get there.
                await here.until_read(1, await here.append(MESSAGES))
                if part == 2:
                    await here.finish(reading)
            if part < 2:
                await here.append(MESSAGES)  # to no one
        assert min(reader.connections for reader in here.readers) >= 3


@pytest.mark.parametrize("readers", CROWD)
async def test_readers_get_the_whole_sequence_despite_killed_store(readers: int, tmp_path: Path) -> None:
    async with world(tmp_path, readers) as here, server(here.valkey.url, tmp_path / "home", here.port):
        reading = asyncio.gather(*(reader.read(here.last) for reader in here.readers))
        await here.until_read(readers, 2)
        begun = [reader.connections for reader in here.readers]
        for _ in range(2):
            await here.until_read(1, await here.append(MESSAGES))
            os.kill(here.valkey.child.pid, signal.SIGKILL)
            await here.valkey.stop()
            await here.valkey.start()
        await here.append(MESSAGES)
        await here.finish(reading)
        assert [reader.connections for reader in here.readers] == begun, "a stream has ended with the store"
