"""What is refused before the application sees it counts as refused, by its reason."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import httpx2
import pytest

from deckhands.server.serving import MAX_HEAD_BYTES
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
    """Return the status of the last answer to what is sent; the server ends the connection."""
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


async def test_what_is_refused_below_the_application_counts_by_its_reason(
    tmp_path: Path, programs: dict[str, str]
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
            samples = samples_in((await client.get("/metrics")).content)
    name = "deckhands_http_refusals_total"
    assert {reason: value_of(samples, name, reason=reason) for reason in refused} == {
        reason: len(requests) for reason, requests in refused.items()
    }
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
