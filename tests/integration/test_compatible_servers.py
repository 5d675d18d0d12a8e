"""The backend `openai` against hand-written HTTP servers: it tolerates the same deviations as the large clients."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from broker.runtime.clock import SystemClock
from controller_worker.model.registry import create_llm
from controller_worker.providers.config import LLMConfig
from controller_worker.providers.errors import LLMConfigError, ModelError, ModelTimeoutError
from controller_worker.providers.llm import LLM, Completion, ModelRequest
from controller_worker.providers.messages.messages import Message, TextPart
from controller_worker.providers.wires.http_transport import STALE_LIMIT
from tests.certificates import certificate_in
from tests.polling import until

LIMIT_SECONDS = 60.0
KEY = "sk-a-key-of-thirty-characters-000"
REQUEST = ModelRequest((Message("user", (TextPart("Hi."),)),), (), "c1", 1, "/w")
WATCHED = replace(REQUEST, on_delta=lambda _: None)
CLOSE = b""
"""Instead of an answer: the connection is closed once the request is read."""
REPLY = json.dumps(
    {
        "id": "r1",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
).encode()
EVENTS = b'data: {"id":"r1","model":"m","choices":[{"index":0,"delta":{"content":"hello"},"finish_reason":"stop"}]}\n\n'


def answer(body: bytes, *headers: str, status: int = 200, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = [f"HTTP/1.1 {status} Said", *headers, f"Content-Length: {size}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@dataclass
class Scripted:
    """A server that answers each connection by a script, and closes it behind the last answer.

    Attributes:
        connections: the answers of each connection; the last script is that of all further ones.
        is_held: whether a connection stays open behind its last answer, until the test ends.
    """

    connections: Sequence[Sequence[bytes]]
    is_held: bool = False
    address: str = ""
    requests: list[bytes] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _begun: int = 0
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _served: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers = self.connections[min(self._begun, len(self.connections) - 1)]
        self._begun += 1
        self.writers.append(writer)
        served = asyncio.current_task()
        assert served is not None
        self._served.add(served)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # the client may have had enough
            for said in answers:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = [line.partition(b":") for line in head.lower().split(b"\r\n")]
                size = next((int(value) for name, _, value in lines if name == b"content-length"), 0)
                self.requests.append(head + await reader.readexactly(size))
                writer.write(said)
                await writer.drain()
            if self.is_held:
                await self._ended.wait()
        writer.close()

    async def end(self) -> None:
        self._ended.set()
        await asyncio.gather(*self._served)


@contextlib.asynccontextmanager
async def scripted(
    *connections: Sequence[bytes], is_held: bool = False, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Scripted]:
    script = Scripted(connections, is_held)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0, ssl=tls)
    script.address = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, asyncio.timeout(LIMIT_SECONDS):
        yield script
        await script.end()


@contextlib.asynccontextmanager
async def deaf() -> AsyncIterator[str]:
    """Listen and read nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def sockets_to(address: str) -> int:
    """Return how many sockets of this process are connected to a server."""
    port = urlsplit(address).port
    return sum(bool(each.raddr) and each.raddr.port == port for each in psutil.Process().net_connections("tcp"))


@contextlib.asynccontextmanager
async def client(url: str, **changes: Any) -> AsyncIterator[LLM]:
    fields: dict[str, Any] = {"model": "m", "backend": "openai", "api_key": KEY, "stream_replies": "off"}
    llm = create_llm(LLMConfig.create(**(fields | {"base_url": url} | changes)), SystemClock())
    try:
        yield llm
    finally:
        await llm.aclose()


async def asked(url: str, *requests: ModelRequest, **changes: Any) -> list[Completion]:
    """Make calls one after the other with one client."""
    async with client(url, **changes) as llm:
        return [await llm.complete(request) for request in requests]


async def failed(url: str, *requests: ModelRequest) -> ModelError:
    with pytest.raises(ModelError) as caught:
        await asked(url, *requests)
    return caught.value


async def test_a_connection_that_was_closed_meanwhile_costs_no_attempt() -> None:
    async with scripted([answer(REPLY), CLOSE], [answer(REPLY)]) as server:
        replies = await asked(server.address, REQUEST, REQUEST)
    assert [reply.text for reply in replies] == ["hello", "hello"]
    first, unread, again = (request.partition(b"\r\n\r\n")[2] for request in server.requests)
    assert first == unread == again


async def test_connections_that_are_closed_behind_each_answer_cost_no_attempt() -> None:
    async with scripted([answer(REPLY)]) as server:
        assert len(await asked(server.address, *[REQUEST] * 5)) == 5


async def test_a_new_connection_that_is_closed_is_a_failed_attempt() -> None:
    async with scripted([CLOSE]) as server:
        assert (await failed(server.address, REQUEST)).code == "service_unavailable"
    assert len(server.requests) == 1


async def test_broken_reply_on_a_used_connection_is_a_failed_attempt() -> None:
    async with scripted([answer(REPLY), answer(REPLY[:9], length=len(REPLY))], [answer(REPLY)]) as server:
        assert (await failed(server.address, REQUEST, REQUEST)).code == "service_unavailable"
    assert len(server.requests) == 2


async def test_so_many_closed_connections_are_an_error() -> None:
    used = STALE_LIMIT + 2
    async with scripted(*[[answer(REPLY), CLOSE]] * used) as server, client(server.address) as llm:
        await asyncio.gather(*(llm.complete(REQUEST) for _ in range(used)))  # as many connections, now idle
        with pytest.raises(ModelError) as caught:
            await llm.complete(REQUEST)
    assert caught.value.code == "service_unavailable"
    assert len(server.requests) == used + STALE_LIMIT + 1


@pytest.mark.parametrize("unasked", [answer(REPLY.replace(b"hello", b"other")), answer(b"", status=408)])
async def test_unrequested_bytes_on_an_idle_connection_answer_no_request(unasked: bytes) -> None:
    async with scripted([answer(REPLY)], is_held=True) as server, client(server.address) as llm:
        assert (await llm.complete(REQUEST)).text == "hello"
        server.writers[0].write(unasked)
        await server.writers[0].drain()
        async with scripted([answer(REPLY)]) as other:  # by then, it has arrived
            await asked(other.address, REQUEST)
        assert (await llm.complete(REQUEST)).text == "hello"


async def test_call_abandoned_during_its_request_leaves_no_socket() -> None:
    words = replace(REQUEST, messages=(Message("user", (TextPart("x" * 12_000_000),)),))
    async with deaf() as address, client(address, timeout=1.0) as llm:
        with pytest.raises(ModelTimeoutError):
            await llm.complete(words)
        await until(lambda: not sockets_to(address), what="end of the connection")


@pytest.mark.parametrize("is_held", [False, True], ids=["breaks off", "never ends"])
async def test_refusal_is_known_by_status_despite_a_broken_body(is_held: bool) -> None:
    refusal = answer(b'{"error"', "Retry-After: 9", status=429, length=500)
    async with scripted([refusal], is_held=is_held) as server:
        error = await failed(server.address, REQUEST)
    assert (error.code, error.retry_after_seconds) == ("rate_limit", 9.0)


async def test_an_endless_refusal_is_not_read_to_its_end() -> None:
    async with scripted([answer(b"x" * 8_000_000, status=401, length=10**9)], is_held=True) as server:
        began = SystemClock().monotonic()
        assert (await failed(server.address, REQUEST)).code == "authentication"
        assert SystemClock().monotonic() - began < 5.0  # it did not wait for more


async def test_headers_may_be_long() -> None:
    long = "Content-Security-Policy: " + "a" * 40_000
    async with scripted([answer(REPLY, long)]) as server:
        assert (await asked(server.address, REQUEST))[0].text == "hello"


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/plain", REPLY),
        ("text/event-stream", b"\n\n" + REPLY),
        ("application/json", EVENTS),
        ("text/plain", EVENTS),
        ("application/json", codecs.BOM_UTF8 + REPLY),
    ],
)
async def test_streamed_reply_is_read_by_content_not_type(content_type: str, body: bytes) -> None:
    async with scripted([answer(body, f"Content-Type: {content_type}")]) as server:
        assert (await asked(server.address, WATCHED))[0].text == "hello"


@pytest.mark.parametrize("request_made", [REQUEST, WATCHED], ids=["whole", "streamed"])
async def test_page_instead_of_a_reply_is_shown_without_key(request_made: ModelRequest) -> None:
    page = f"<html>Log in, {KEY}</html>".encode()
    async with scripted([answer(page, "Content-Type: text/html")]) as server:
        error = await failed(server.address, request_made)
    assert error.code == "malformed_reply"
    assert "begins with '<html>Log in, <secret-hidden>" in str(error)
    assert KEY not in f"{error!r} {error.provider_text} {error.last_error}"


@pytest.mark.parametrize(
    ("base", "asked_at"),
    [
        ("/v1?api-version=2024-10-21", "/v1/chat/completions?api-version=2024-10-21"),
        ("/v1/?a=b#part", "/v1/chat/completions?a=b"),
        ("/a%2Fb/v1//", "/a%2Fb/v1/chat/completions"),
    ],
)
async def test_an_address_keeps_its_query(base: str, asked_at: str) -> None:
    async with scripted([answer(REPLY)]) as server:
        await asked(server.address + base, REQUEST)
    assert server.requests[0].startswith(f"POST {asked_at} HTTP/1.1\r\n".encode())


async def test_a_redirection_says_where_it_points() -> None:
    async with scripted([answer(REPLY)]) as there:
        to = f"Location: {there.address.replace('//', '//me:passw0rd@')}/v2?token=t"
        async with scripted([answer(b"<html>Moved</html>", to, status=308)]) as server:
            error = await failed(server.address, REQUEST)
        assert f"Redirected to {there.address}/v2, and redirects are not followed" in str(error)
    assert (error.code, there.requests) == ("not_found", [])
    assert not [word for word in ("passw0rd", "token") if word in str(error)]


async def test_an_authority_of_the_environment_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = certificate_in(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    async with scripted([answer(REPLY)], tls=tls) as server:
        untrusted = await failed(server.address, REQUEST)
        assert str(untrusted).startswith("Connection error.")
        assert ("certificate" in str(untrusted), untrusted.retryable) == (True, True)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert (await asked(server.address, REQUEST))[0].text == "hello"


async def test_headers_that_cannot_be_sent_are_no_outage() -> None:
    async with scripted([answer(REPLY)]) as server:
        with pytest.raises(ModelError) as caught:
            await asked(server.address, REQUEST, completion_kwargs={"extra_headers": {"X-Team": "a\nb"}})
    assert (caught.value.code, caught.value.retryable, server.requests) == ("bad_request", False, [])


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1080", "http://me:passw0rd@host:port", "http://[::1"])
async def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(LLMConfigError, match=r"The proxy .*of the environment") as caught:
        await asked("http://models.invalid/v1", REQUEST)
    assert "passw0rd" not in str(caught.value)
