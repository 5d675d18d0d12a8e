"""Requests by aiohttp against a real socket: content, route, and reused connections."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from broker.runtime.clock import SystemClock
from controller_worker.providers.anthropic_backend import AnthropicLLM, SdkTransport
from controller_worker.providers.config import CUSTOM_HEADERS, LLMConfig
from controller_worker.providers.wires.egress import find_environment_proxy
from controller_worker.providers.wires.event_stream import REPLY_LIMIT_BYTES, read_whole_reply
from controller_worker.providers.wires.http_transport import (
    AnswerRefused,
    HttpTransport,
    RequestFailed,
)
from controller_worker.providers.wires.provider_errors import to_model_error
from controller_worker.providers.wires.raw_client import PIECE_BYTES
from tests.certificates import certificate_in
from tests.polling import unhurried

LIMIT_SECONDS = 60.0
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@dataclass
class Listening:
    """A server that takes one request, as bytes, and answers once it may."""

    answer: bytes = ANSWER
    address: str = ""
    request: bytes = b""
    has_all: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def head(self) -> list[str]:
        """Return the lines of the request head, in lower case except the first."""
        first, *lines = self.request.partition(b"\r\n\r\n")[0].decode().split("\r\n")
        return [first, *(line.lower() for line in lines)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read what the length says, then answer."""
        head = await reader.readuntil(b"\r\n\r\n")
        lines = [line.partition(b":") for line in head.lower().split(b"\r\n")]
        size = next((int(value) for name, _, value in lines if name == b"content-length"), 0)
        self.request = head + await reader.readexactly(size)
        self.has_all.set()
        await self.may_answer.wait()
        with contextlib.suppress(ConnectionError):  # the client may have had enough
            writer.write(self.answer)
            await writer.drain()
        writer.close()
        self.has_ended.set()


@contextlib.asynccontextmanager
async def listening(answer: bytes = ANSWER) -> AsyncIterator[Listening]:
    found = Listening(answer)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    found.address = f"http://{host}:{port}"
    async with server, asyncio.timeout(unhurried(LIMIT_SECONDS)):  # the first client loads its SDK meanwhile
        yield found
        await found.has_ended.wait()


@contextlib.asynccontextmanager
async def transport(address: str, **settings: object) -> AsyncIterator[HttpTransport]:
    config = LLMConfig.create(model="my-own", base_url=address, backend="openai", **settings)
    made = HttpTransport(config, "the-key")
    try:
        yield made
    finally:
        await made.aclose()


async def whole_answer(made: HttpTransport) -> bytes:
    answer = await made.post("/chat/completions", b"{}", {})
    try:
        return await read_whole_reply(answer.chunks())
    finally:
        await answer.aclose()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("url", "environment", "proxy"),
    [
        ("https://api.example.com/v1", {}, None),
        ("https://api.example.com/v1", {"HTTPS_PROXY": "http://p:1"}, "http://p:1"),
        ("https://api.example.com/v1", {"https_proxy": "p:1"}, "http://p:1"),
        ("https://api.example.com/v1", {"HTTP_PROXY": "http://p:1"}, None),
        ("https://api.example.com/v1", {"ALL_PROXY": "http://p:1"}, "http://p:1"),
        ("http://api.example.com/v1", {"HTTP_PROXY": "http://p:1", "ALL_PROXY": "http://q:2"}, "http://p:1"),
        ("https://api.example.com/v1", {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "example.com"}, None),
        ("https://api.example.com/v1", {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "*"}, None),
        ("https://api.example.com/v1", {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "ample.com"}, "http://p:1"),
        ("http://me:pass@10.0.0.7:8000/v1", {"HTTP_PROXY": "http://p:1", "NO_PROXY": "10.0.0.7"}, None),
        ("http://10.0.0.7:8000/v1", {"HTTP_PROXY": "http://p:1", "NO_PROXY": "10.0.0.7:8001"}, "http://p:1"),
        ("http://10.0.0.7:8000/v1", {"HTTP_PROXY": "http://p:1", "NO_PROXY": "a.b, 10.0.0.0/8"}, None),
        ("http://10.0.0.7:8000/v1", {"HTTP_PROXY": "http://p:1", "NO_PROXY": "10.0.1.0/24,::/0"}, "http://p:1"),
        ("http://[::1]:8000/v1", {"HTTP_PROXY": "http://p:1", "NO_PROXY": "::1"}, None),
        ("http://[fd00::7]:8000/v1", {"HTTP_PROXY": "http://p:1", "NO_PROXY": "fd00::/8"}, None),
    ],
)
def test_the_environment_names_the_proxy(
    monkeypatch: pytest.MonkeyPatch, url: str, environment: dict[str, str], proxy: str | None
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_environment_proxy(url) == proxy


async def test_a_request_goes_by_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as proxy:
        proxy.may_answer.set()
        monkeypatch.setenv("HTTP_PROXY", proxy.address)
        async with transport("http://models.invalid/v1") as made:
            assert await whole_answer(made) == b"{}"
    assert proxy.head[0] == "POST http://models.invalid/v1/chat/completions HTTP/1.1"


@pytest.mark.parametrize(("scheme", "verb"), [("http", "POST"), ("https", "CONNECT")])
async def test_proxy_login_is_sent_to_it_and_never_in_errors(
    monkeypatch: pytest.MonkeyPatch, scheme: str, verb: str
) -> None:
    refusal = b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    async with listening(refusal) as proxy:
        proxy.may_answer.set()
        monkeypatch.setenv(f"{scheme.upper()}_PROXY", proxy.address.replace("//", "//user:passw0rd@"))
        async with transport(f"{scheme}://models.invalid/v1") as made:
            with pytest.raises(made.failures) as failed:
                await whole_answer(made)
    assert proxy.head[0].startswith(f"{verb} ")
    assert "proxy-authorization: basic dxnlcjpwyxnzdzbyza==" in proxy.head  # lowered by the reader
    texts = [str(error) for error in (failed.value, failed.value.__cause__)]
    assert not [text for text in texts if "passw0rd" in text], texts


async def test_server_and_proxy_each_get_only_their_own_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    certificate, key = certificate_in(tmp_path, "models.invalid")
    context, asked = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), []
    context.load_cert_chain(certificate, key)

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).lower())
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await writer.drain()
        await writer.start_tls(context)
        asked.append((await reader.readuntil(b"\r\n\r\n")).lower())
        writer.write(ANSWER)
        await writer.drain()
        writer.close()

    proxy = await asyncio.start_server(tunnel, "127.0.0.1", 0)
    host, port = proxy.sockets[0].getsockname()
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:passw0rd@{host}:{port}")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with proxy, asyncio.timeout(LIMIT_SECONDS), transport("https://models.invalid/v1") as made:
        assert await whole_answer(made) == b"{}"
    to_proxy, to_server = asked
    assert b"\r\nproxy-authorization: basic" in to_proxy
    assert b"\r\nauthorization" not in to_proxy
    assert b"\r\nproxy-authorization" not in to_server
    assert b"\r\nauthorization: bearer the-key" in to_server


async def test_body_sent_by_an_sdk_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUSTOM_HEADERS, "x-gateway: 1")
    for sent in (bytes(bytearray(b"x" * (PIECE_BYTES + 7))), bytes(bytearray(b"y" * 1_000))):
        alone = sys.getrefcount(sent)
        async with listening() as server:
            config = LLMConfig.create(model="claude-sonnet-5", base_url=server.address, api_key="the-key")
            llm = AnthropicLLM(config, SystemClock())
            assert isinstance(llm._client.transport, SdkTransport)
            asking = asyncio.create_task(llm._client.transport.post("/v1/messages", sent, {}))
            await server.has_all.wait()
            assert server.request.endswith(b"\r\n\r\n" + sent)
            assert not [line for line in server.head if line.startswith("transfer-encoding")]
            assert sys.getrefcount(sent) == alone
            server.may_answer.set()
            await (await asking).aclose()
            await llm.aclose()


async def test_a_body_is_forgotten_once_it_is_sent() -> None:
    body = bytes(bytearray(b"x" * (PIECE_BYTES + 7)))
    small = bytes(bytearray(b"y" * 1_000))
    for sent in (body, small):
        alone = sys.getrefcount(sent)
        async with listening() as server, transport(server.address) as made:
            asking = asyncio.create_task(made.post("/chat/completions", sent, {}))
            await server.has_all.wait()
            assert server.request.endswith(b"\r\n\r\n" + sent)
            assert sys.getrefcount(sent) == alone
            server.may_answer.set()
            await (await asking).aclose()


@pytest.mark.parametrize(
    ("userinfo", "headers", "login"),
    [
        ("", {}, "authorization: bearer the-key"),
        ("", {"authorization": "other"}, "authorization: other"),
        ("me:pa%20ss@", {}, "authorization: basic bwu6cgegc3m="),
    ],
)
async def test_there_is_one_login(userinfo: str, headers: dict[str, str], login: str) -> None:
    async with listening() as server:
        server.may_answer.set()
        async with transport(server.address.replace("//", f"//{userinfo}") + "/v1/") as made:
            await (await made.post("/chat/completions", b"{}", headers)).aclose()
    assert server.head[0] == "POST /v1/chat/completions HTTP/1.1"
    assert [line for line in server.head if line.startswith("authorization")] == [login]
    assert "user-agent: deckhands" in server.head
    assert not [line for line in server.head if line.startswith("transfer-encoding")]


@pytest.mark.parametrize(
    ("content_type", "said"),
    [
        ("text/html; charset=iso-8859-1", "sch\xf6n"),
        ("text/html; charset=what-is-this", "sch\ufffdn"),
        ("text/html; charset=idna", "sch\ufffdn"),
        ("text/html; charset=punycode", "sch\ufffdn"),
    ],
)
async def test_a_refusal_in_any_charset_can_be_read(content_type: str, said: str) -> None:
    head = f"HTTP/1.1 418 No\r\nContent-Type: {content_type}\r\nContent-Length: 5\r\n\r\n"
    async with listening(head.encode() + b"sch\xf6n") as server, transport(server.address) as made:
        server.may_answer.set()
        with pytest.raises(AnswerRefused) as caught:
            await made.post("/chat/completions", b"{}", {})
    assert (caught.value.status_code, str(caught.value)) == (418, said)


@pytest.mark.parametrize(
    ("status", "rest"),
    [
        *((status, b"Location: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n") for status in (301, 302, 307)),
        (500, b"\r\n" + bytes(2 * REPLY_LIMIT_BYTES)),
    ],
    ids=["301", "302", "307", "endless"],
)
async def test_a_redirect_or_an_endless_answer_is_a_refusal(status: int, rest: bytes) -> None:
    head = f"HTTP/1.1 {status} No\r\n".encode()
    async with listening(head + rest) as server, transport(server.address) as made:
        server.may_answer.set()
        with pytest.raises(AnswerRefused) as caught:
            await made.post("/chat/completions", b"{}", {})
        await server.has_ended.wait()
    assert caught.value.status_code == status


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", ANSWER[:-1]])
async def test_an_answer_that_breaks_off_has_failed(answer: bytes) -> None:
    async with listening(answer) as server, transport(server.address) as made:
        server.may_answer.set()
        with pytest.raises(RequestFailed) as caught:
            await whole_answer(made)
    assert to_model_error(caught.value).code == "service_unavailable"


@pytest.mark.parametrize(("settings", "read_seconds"), [({"read_timeout": 0.05}, None), ({}, 0.05)])
async def test_a_silence_that_is_too_long_is_called_one(settings: dict[str, float], read_seconds: float | None) -> None:
    async with listening() as server, transport(server.address, **settings) as made:
        try:
            with pytest.raises(RequestFailed, match="timed out") as caught:
                await made.post("/chat/completions", b"{}", {}, read_seconds=read_seconds)
        finally:
            server.may_answer.set()
    assert isinstance(caught.value.__cause__, TimeoutError)
