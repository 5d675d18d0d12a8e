"""Slow or hostile peers of a server: each gets its answer, costs little, and delays no other."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx2
import psutil
import pytest
import pytest_asyncio

from broker.store.embedded import EmbeddedValkey
from broker.store.store import open_store
from deckhands.client.client import Client
from tests.faults.server_process import free_port, server
from tests.left_logs import verify_left_logs
from tests.polling import unhurried, until
from tests.server_parts import add_key
from tests.unit.deckhands.sample_log import state

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT = 60.0
HURRIED_SECONDS = 1.0
ROOM_BYTES = 96 * 2**20
"""What all the peers of a test together may cost in memory; what they send or ask for is several times as much."""
CPU_SECONDS = 20.0
QUIET_SECONDS = 60.0
"""More than the limits of this server, and less than the half minute for which a connection that does nothing is kept."""
LATE_AT_MOST = 20
LARGE = 300
"""Events of 30 KB each: more than the buffers of a connection take."""


@dataclass
class Besieged:
    """A server with short limits, a conversation with a long log, and the resources of the process at rest."""

    client: Client
    port: int
    process: psutil.Process
    conversation_id: str
    last_id: int
    key: str
    connections: int = 0

    @property
    def head(self) -> bytes:
        """The headers of a request that may do everything."""
        return f"Host: localhost\r\nAuthorization: Bearer {self.key}\r\n".encode()

    @contextlib.asynccontextmanager
    async def unharmed(self) -> AsyncIterator[None]:
        """Wait at the end until all peers have left, and check that they cost little."""
        memory, cpu = self.process.memory_info().rss, sum(self.process.cpu_times()[:2])
        yield

        def is_quiet() -> bool:
            return len(self.process.net_connections("tcp")) <= self.connections

        await until(is_quiet, limit=QUIET_SECONDS, what="end of the connections", every=0.5)
        assert self.process.memory_info().rss - memory < ROOM_BYTES
        assert sum(self.process.cpu_times()[:2]) - cpu < CPU_SECONDS

    async def answers(self) -> None:
        """See that others are served meanwhile; this process may itself be too late with a request, beside all peers."""
        headers = {"Authorization": f"Bearer {self.key}"}
        async with httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=LIMIT
        ) as client:
            late = 0
            for _ in range(5):
                while (status := (await client.get("/conversations")).status_code) == 408 and late < LATE_AT_MOST:
                    late += 1
                assert status == 200

    async def status(self, request: bytes) -> int:
        """The status of the answer to a request, which may come before all of it was sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.suppress(ConnectionError):
            writer.write(request)
        async with asyncio.timeout(unhurried(LIMIT)):
            line = await reader.readline()
        writer.close()
        return int(line.split()[1])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def besieged(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Besieged]:
    tmp_path = tmp_path_factory.mktemp("besieged")
    valkey = EmbeddedValkey(tmp_path / "valkey")
    await valkey.start()
    client = Client(await open_store(valkey.url))
    try:
        cid, port = await client.submit("do it"), free_port()
        key = await add_key(client.store, requests_per_minute=1_000_000, streams=5_000)
        large = [state("running", reason="x" * 30_000)] * 100
        for _ in range(LARGE // len(large)):
            await client.log.append(cid, large)
        async with server(valkey.url, tmp_path / "home", port, limit_seconds=HURRIED_SECONDS) as running:
            found = Besieged(client, port, psutil.Process(running.pid), cid, await client.log.load_last_id(cid), key)
            await found.answers()
            found.connections = len(found.process.net_connections("tcp"))
            yield found
        await verify_left_logs(client, forged={cid})
    finally:
        await client.aclose()
        await valkey.stop()


def that_takes_nothing(besieged: Besieged, request: str) -> socket.socket:
    """A connection with a small buffer that asks and does not read."""
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    peer.connect(("127.0.0.1", besieged.port))
    peer.sendall(f"GET {request} HTTP/1.1\r\n".encode() + besieged.head + b"\r\n")
    return peer


async def ids_in(besieged: Besieged, *, after: int, until_id: int) -> list[int]:
    """The ids of the events of a stream up to one."""
    found: list[int] = []
    reader, writer = await asyncio.open_connection("127.0.0.1", besieged.port, limit=2**20)
    request = f"GET /conversations/{besieged.conversation_id}/stream HTTP/1.1\r\nLast-Event-ID: {after}\r\n"
    writer.write(request.encode() + besieged.head + b"\r\n")
    async with asyncio.timeout(unhurried(LIMIT)):
        while not found or found[-1] < until_id:
            line = await reader.readline()
            assert line, f"the stream has ended behind {found[-1:]}"
            if line.startswith(b"id: "):
                found.append(int(line[4:]))
    writer.close()
    return found


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.soak)])
async def test_stalled_readers_are_dropped_and_can_resume(besieged: Besieged, count: int) -> None:
    cid, last = besieged.conversation_id, besieged.last_id
    whole = list(range(1, last + 1))
    async with besieged.unharmed():
        slow = [that_takes_nothing(besieged, f"/conversations/{cid}/stream") for _ in range(count)]
        fast = await asyncio.gather(*(ids_in(besieged, after=0, until_id=last) for _ in range(3)))
        assert all(found == whole for found in fast)
        await besieged.client.send_message(cid, "more")
        besieged.last_id += 1
        assert await ids_in(besieged, after=last, until_id=last + 1) == [last + 1]
    for peer in slow:
        peer.close()
    assert await ids_in(besieged, after=3, until_id=last) == whole[3:]


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.soak)])
async def test_peers_that_read_no_answers_are_dropped(besieged: Besieged, count: int) -> None:
    path = f"/conversations/{besieged.conversation_id}/events?limit=1000"
    async with besieged.unharmed():
        slow = [that_takes_nothing(besieged, path) for _ in range(count)]
        await besieged.answers()
    for peer in slow:
        peer.close()


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.soak)])
async def test_a_slow_loris_is_sent_away_and_holds_up_nobody(besieged: Besieged, count: int) -> None:
    """Some start a head, some a body, some are silent; all of them send a byte now and then."""
    post = b"POST /conversations HTTP/1.1\r\n" + besieged.head + b"Content-Type: application/json\r\n"
    beginnings = (b"", b"GET /health HTTP/1.1\r\nX-Long: ", post + b"Content-Length: 1000\r\n\r\n{")

    async def crawl(beginning: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", besieged.port)
        answer = asyncio.create_task(reader.read())
        with contextlib.suppress(ConnectionError):
            writer.write(beginning)
            while not answer.done():
                writer.write(b"a" if beginning else b"")
                await asyncio.wait((answer,), timeout=0.2)
        writer.close()
        with contextlib.suppress(ConnectionError):
            return (await answer).partition(b"\r\n")[0]
        return b""

    async with besieged.unharmed(), asyncio.timeout(unhurried(LIMIT)):
        crawling = asyncio.gather(*(crawl(beginnings[number % 3]) for number in range(count)))
        await besieged.answers()
        answers = await crawling
    # A connection that is closed while its peer still sends may lose the answer to a reset.
    assert set(answers) <= {b"HTTP/1.1 408 Request Timeout", b""}
    assert answers[0] == b"HTTP/1.1 408 Request Timeout"
    assert len(await besieged.client.recent()) == 1


def requests(besieged: Besieged) -> list[tuple[bytes, set[int]]]:
    """Invalid requests, and their allowed answers."""
    post = b"POST /conversations HTTP/1.1\r\n" + besieged.head + b"Content-Type: application/json\r\n"
    found: list[tuple[bytes, set[int]]] = [
        (post + b"Content-Length: 1048577\r\n\r\n", {413}),
        (post + b"Content-Length: 99999999999999999999\r\n\r\n", {400, 413}),
        (post + b"Transfer-Encoding: chunked\r\n\r\n" + b"10000\r\n" + b"1" * 65_536 + b"\r\n" * 1, {400, 408}),
        (post + b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b"1" * 65_536 + b"\r\n") * 17, {413}),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 1_000_000 + b"\r\n\r\n", {400, 431}),
        (b"\x16\x03\x01\x02\x00" + b"x" * 100 + b"\r\n\r\n", {400}),
    ]
    bodies = (b'{"task": "\xff\xfe"}', b"[" * 500_000, b'{"a":' * 100_000, b'"' + b'\\"' * 200_000, b"\x00" * 1_000)
    found += [(post + b"Content-Length: %d\r\n\r\n" % len(body) + body, {400}) for body in bodies]
    tricks = (
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/x",
        "a/%2e%2e/%2e%2e/x",
        "%2fetc%2fpasswd",
        "a%00b",
        "a%5c..%5cb",
    )
    tricks += ("%c0%ae%c0%ae/x", "a%0d%0aX: y", "%ff%fe", "%2e", "a//b", "x" * 300, "/".join("a" * 3_000))
    for trick in tricks:
        place = f"/conversations/{besieged.conversation_id}/files/{trick} HTTP/1.1\r\n".encode() + besieged.head
        found.append((b"PUT " + place + b"Content-Length: 1\r\n\r\nx", {400, 404, 409}))
        found.append((b"GET " + place + b"\r\n", {400, 404, 409}))
    return found


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.soak)])
async def test_hostile_requests_are_refused_and_leave_nothing(besieged: Besieged, rounds: int) -> None:
    async with besieged.unharmed():
        for _ in range(rounds):
            for request, statuses in requests(besieged):
                assert await besieged.status(request) in statuses, request[:120]
        await besieged.answers()
    assert [row.conversation_id for row in await besieged.client.recent()] == [besieged.conversation_id]
    assert await besieged.client.log.load_last_id(besieged.conversation_id) == besieged.last_id
