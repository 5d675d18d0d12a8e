"""Requests that a server refuses: malformed ones count by their reason, waiting ones are bounded and end with their callers."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from starlette.types import Message, Receive, Scope, Send
from websockets.asyncio.client import connect

from broker.contract.specs import Tenancy
from deckhands.server.guard import Guard
from deckhands.server.problems import Problem
from deckhands.server.serving import MAX_HEAD_BYTES
from deckhands.server.shares import Turns
from deckhands.server.streams import EventStream
from tests.certificates import certificate_in
from tests.integration.test_cluster_metrics import samples_in, value_of
from tests.polling import unhurried, until
from tests.server_parts import Served, served

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = (
    b"POST /runs/wait HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n"
)
SOCKET = HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"

BOTH = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"
SECOND = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"
SMUGGLED = (
    HEAD + BOTH + b"\r\n0\r\n\r\n" + SECOND,
    HEAD + b"transfer-encoding: chunked\r\ncontent-length: 0\r\n\r\n0\r\n\r\n",
    HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    HEAD.replace(b"\r\n", b"\n") + b"\n",
    HEAD + b"X: a\nTransfer-Encoding: chunked\r\n\r\n",
    HEAD + b"X: a\nContent-Length: 4\r\n\r\nGET ",
    HEAD + b"Content-Length: 20000\r\nX: a\nX-Smuggled: y\r\n\r\n" + b"x" * 20_000,
    HEAD + b"X: " + b"x" * MAX_HEAD_BYTES + b"\r\nX: a\nX-Smuggled: y\r\n\r\n",
    HEAD + b"\n" + SECOND,
    b"\n" + HEAD + b"\r\n",
    HEAD + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
    HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
)
"""Requests that a proxy could take for others, or for two."""


async def status_of(server: Served, *parts: bytes) -> int:
    """Return the status of the last answer to the request; the server ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    status = 0
    for part in parts:
        writer.write(part)
        async with asyncio.timeout(unhurried(30)):
            status = int((await reader.readline()).split()[1])
            if part is not parts[-1]:
                await reader.readuntil(b"}")
    async with asyncio.timeout(unhurried(30)):
        await reader.read()
    writer.close()
    return status


async def test_refusals_below_the_application_count_by_reason(
    tmp_path: Path, programs: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path / "log", programs, head_seconds=0.5) as server:
        refused: dict[str, list[tuple[tuple[bytes, ...], int]]] = {
            "malformed_head": [
                ((b"\x16\x03\x01\x02\x00 nonsense\r\n\r\n",), 400),
                ((b"GET /health HTTP/1.1\r\nHost: localhost\r\nno header\r\n\r\n",), 400),
                ((b"GET /health HTTP/1.1\r\n\r\n",), 400),
                *(((request,), 400) for request in SMUGGLED),
            ],
            "head_too_large": [((HEAD + b"X: " + b"x" * 2 * MAX_HEAD_BYTES,), 400)],
            "head_too_slow": [((b"",), 408), ((HEAD,), 408), ((HEAD + b"\r\n", HEAD), 408)],
            "malformed_body": [
                ((POST + b"\r\nno length\r\n",), 400),
                ((POST + b"\r\n0\r\nX: y\n\r\n",), 400),
            ],
            "malformed_handshake": [((SOCKET + b"\r\n",), 400)],
        }
        for requests in refused.values():
            for parts, status in requests:
                assert await status_of(server, *parts) == status, parts
        async with server.as_(await server.token("*")) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/conversations/none")).status_code == 404
            name = "deckhands_http_refusals_total"

            async def are_counted() -> bool:
                """The figures are up to a few seconds old."""
                samples = samples_in((await client.get("/metrics")).content)
                counted = {reason: value_of(samples, name, reason=reason) for reason in refused}
                return counted == {reason: len(requests) for reason, requests in refused.items()}

            await until(are_counted, what="the counts of all refusals")
            samples = samples_in((await client.get("/metrics")).content)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert value_of(samples, name, status="408") == 3
    assert value_of(samples, name, status="404", reason="") == value_of(samples, name, status="404") == 1


def greet_with_tls(host: str, port: int) -> None:
    """Shake hands as a client that trusts the authorities of this machine, and says why it leaves."""
    with socket.create_connection((host, port)) as plain:
        ssl.create_default_context().wrap_socket(plain, server_hostname=host).close()


async def test_a_handshake_that_fails_counts(
    tmp_path: Path, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = certificate_in(tmp_path)
    async with served(tmp_path / "log", programs, certificate=certificate, certificate_key=key) as server:
        address = "127.0.0.1", server.port
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.to_thread(greet_with_tls, *address)
        for nonsense in (HEAD + b"\r\n", b"\x16\x03\x01\x00\x05nonsense"):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(nonsense)
            async with asyncio.timeout(unhurried(30)):
                await reader.read()
            writer.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        headers = {"Authorization": f"Bearer {await server.token('*')}"}
        address = f"https://127.0.0.1:{server.port}"
        async with httpx2.AsyncClient(base_url=address, headers=headers, timeout=30) as client:

            async def is_counted() -> bool:
                samples = samples_in((await client.get("/metrics")).content)
                return value_of(samples, "deckhands_http_refusals_total", status="", reason="tls_handshake") == 3

            await until(is_counted, what="three handshakes")


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
    "/a2a": A2A | {"method": "SendStreamingMessage", "params": {"message": MESSAGE | {"messageId": "m-2"}}},
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
            await until(lambda: not streams, what="the end of streams without a reader")
            assert await begun(server) == number


async def test_one_tenant_cannot_take_the_streams_of_others(tmp_path: Path, programs: dict[str, str]) -> None:
    options = {"max_streams": 10, "tenant_percent": 100}
    async with served(tmp_path / "log", programs, **options) as server, AsyncExitStack() as stack:
        clients = {
            tenant: [server.as_(await server.token(tenant)) for _ in range(2)] for tenant in ("greedy", "modest")
        }
        first, second = clients["greedy"]
        paths = {}
        for tenant, both in clients.items():
            cid = await server.client.submit("do it", tenancy=Tenancy(tenant=tenant))
            paths[tenant] = f"/conversations/{cid}/stream"
            for client in both:
                stack.push_async_callback(client.aclose)
        for number in range(9):
            client = (first, second)[number % 2]
            opened = await stack.enter_async_context(client.stream("GET", paths["greedy"]))
            assert opened.status_code == 200
        refused = await second.get(paths["greedy"])
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams_of_tenant")
        opened = await stack.enter_async_context(clients["modest"][0].stream("GET", paths["modest"]))
        assert opened.status_code == 200


async def test_tenant_has_one_share_of_streams_for_all_keys(tmp_path: Path, programs: dict[str, str]) -> None:
    async with served(tmp_path / "log", programs, max_streams=40) as server, AsyncExitStack() as stack:
        clients = [server.as_(await server.token("greedy")) for _ in range(4)]
        for client in clients:
            stack.push_async_callback(client.aclose)
        cid = await server.client.submit("do it", tenancy=Tenancy(tenant="greedy"))
        path = f"/conversations/{cid}/stream"
        for number in range(20):
            await stack.enter_async_context(clients[number % 4].stream("GET", path))
        refused = await clients[0].get(path)
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams_of_tenant")
        assert (refused.headers["Retry-After"], "--tenant-percent" in refused.json()["remedy"]) == ("2", True)
        waits = await clients[1].post("/runs/wait", json={"task": "do it"})
        assert (waits.status_code, waits.json()["code"]) == (429, "too_many_streams_of_tenant")
        other = await stack.enter_async_context(server.as_(await server.token("modest")))
        theirs = await server.client.submit("do it", tenancy=Tenancy(tenant="modest"))
        for _ in range(15):
            opened = await stack.enter_async_context(other.stream("GET", f"/conversations/{theirs}/stream"))
            assert opened.status_code == 200


async def test_a_tenant_has_its_share_of_uploads(tmp_path: Path, programs: dict[str, str]) -> None:
    async with served(tmp_path / "log", programs, max_transfers=4) as server, AsyncExitStack() as stack:
        greedy = [await stack.enter_async_context(server.as_(await server.token("greedy"))) for _ in range(2)]
        is_over = asyncio.Event()

        async def slow_body() -> AsyncIterator[bytes]:
            yield b"begun"
            await is_over.wait()

        path, headers = f"/uploads/{'0' * 64}", {"Idempotency-Key": "one"}
        held = [asyncio.create_task(one.put(path, content=slow_body(), headers=headers)) for one in greedy]
        await until(lambda: len(server.gateway.transfers) == 2, what="two uploads")
        refused = await greedy[0].put(path, content=b"more", headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_transfers_of_tenant")
        others = [await stack.enter_async_context(server.as_(await server.token(f"t{n}"))) for n in range(3)]
        more = [asyncio.create_task(one.put(path, content=slow_body(), headers=headers)) for one in others[:2]]
        await until(lambda: len(server.gateway.transfers) == 4, what="four uploads")
        full = await others[2].put(path, content=b"more", headers=headers)
        assert (full.status_code, full.json()["code"]) == (503, "too_many_transfers")
        is_over.set()
        assert {one.status_code for one in await asyncio.gather(*held, *more)} == {422}  # another SHA-256
        assert len(server.gateway.transfers) == 0
        assert (await greedy[0].put(path, content=b"more", headers=headers)).status_code == 422


async def test_a_tenant_has_its_share_of_connections(tmp_path: Path, programs: dict[str, str]) -> None:
    async with served(tmp_path / "log", programs, max_connections=6) as server, AsyncExitStack() as stack:
        greedy = [await stack.enter_async_context(server.as_(await server.token("greedy"))) for _ in range(4)]
        answers = [await one.get("/budgets") for one in greedy]  # each keeps its connection
        assert [one.status_code for one in answers] == [200, 200, 200, 429]
        assert answers[-1].json()["code"] == "too_many_connections_of_tenant"
        assert (await greedy[0].get("/budgets")).status_code == 200
        modest = await stack.enter_async_context(server.as_(await server.token("modest")))
        assert (await modest.get("/budgets")).status_code == 200
        await greedy[1].aclose()
        await until(lambda: len(server.gateway.connections) == 3, what="the end of a connection")
        assert (await greedy[3].get("/budgets")).status_code == 200


async def test_short_requests_of_a_tenant_take_turns_delaying_no_other() -> None:
    turns = Turns(2, max_waiting=48)
    is_over = asyncio.Event()
    started: list[str] = []

    async def request(tenant: str) -> None:
        end = await turns.take(tenant)
        started.append(tenant)
        await is_over.wait()
        end()
        end()  # which has no further effect

    waiting = [asyncio.create_task(request(tenant)) for tenant in (*["greedy"] * 50, "modest")]
    await until(lambda: "modest" in started, what="the request of another tenant")
    assert started.count("greedy") == 2
    with pytest.raises(Problem, match="48 requests of this tenant wait"):
        await turns.take("greedy")
    is_over.set()
    await asyncio.gather(*waiting)
    assert started.count("greedy") == 50


async def test_turn_ends_before_the_answer_is_read() -> None:
    turns, is_read, answered = Turns(1, max_waiting=8), asyncio.Event(), 0
    gateway = SimpleNamespace(turns=turns)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": False})

    async def read_slowly(message: Message) -> None:
        nonlocal answered
        if message["type"] == "http.response.body":
            answered += 1
            await is_read.wait()

    guard = Guard(answer, gateway)  # type: ignore[arg-type]
    receive: Any = None
    requests = [asyncio.create_task(guard._take_turn("t", {}, receive, read_slowly)) for _ in range(3)]
    await until(lambda: answered == 3, what="three answers at a time")
    is_read.set()
    await asyncio.gather(*requests)


async def test_many_conversations_of_a_tenant_are_all_created(tmp_path: Path, programs: dict[str, str]) -> None:
    async with served(tmp_path / "log", programs) as server, server.as_(await server.token("greedy")) as client:
        answers = await asyncio.gather(*(client.post("/conversations", json={"task": "do it"}) for _ in range(40)))
        assert {one.status_code for one in answers} == {201}
        assert len({one.json()["conversation_id"] for one in answers}) == 40


async def test_connections_beyond_the_limit_of_the_server_are_closed(tmp_path: Path, programs: dict[str, str]) -> None:
    async with served(tmp_path / "log", programs, max_connections=3) as server:
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        assert server.gateway.refusals["503", "too_many_connections"] == 1
        for _, each in (*held, (reader, writer)):
            each.close()
            await each.wait_closed()


async def test_one_key_cannot_take_the_streams_of_others(tmp_path: Path, programs: dict[str, str]) -> None:
    async with served(tmp_path / "log", programs, max_streams=8) as server:
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


async def test_burst_takes_no_more_places_than_there_are(server: Served) -> None:
    for number, (path, body) in enumerate([*WAITING.items(), *STREAMING.items()], 1):
        async with server.as_(await server.token("*")) as client:
            burst = [asyncio.create_task(client.post(path, json=body)) for _ in range(8)]
            await until(lambda burst=burst: sum(one.done() for one in burst) == 7, what=f"refusals of {path}")
            assert all("too_many_streams" in one.result().text for one in burst if one.done()), path
            assert len(server.gateway.streams) == 1
            for one in burst:
                one.cancel()
            await asyncio.gather(*burst, return_exceptions=True)
        await until(lambda: not server.gateway.streams, what="the end of streams without a reader")
        assert await begun(server) == number, path


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
