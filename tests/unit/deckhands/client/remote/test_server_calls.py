"""Requests to a server behind a proxy: repeated while the proxy says that nobody is there, and else not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from broker.coordination.transfers import TransferFailed
from deckhands.client.remote.server_calls import ServerCalls, ServerUnavailable

NOBODY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\n<h1>"
MISSING = NOBODY.replace(b"502 Bad Gateway", b"404 Not Found")
TIMED_OUT = NOBODY.replace(b"502 Bad Gateway", b"504 Gateway Timeout")


def answer(status: str, content: object) -> bytes:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def proxy(*answers: bytes) -> AsyncIterator[tuple[ServerCalls, list[bytes]]]:
    """Calls to what gives one answer after another, and the heads that it gets."""
    heads, left = [], list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while left:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(left.pop(0))
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    calls = ServerCalls(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "")
    try:
        yield calls, heads
    finally:
        await calls.aclose()
        server.close()
        await server.wait_closed()


def keys_in(heads: list[bytes]) -> set[bytes]:
    return {line for head in heads for line in head.lower().split(b"\r\n") if line.startswith(b"idempotency-key")}


async def test_request_repeats_under_its_key_behind_an_empty_proxy() -> None:
    async with proxy(NOBODY, TIMED_OUT, answer("202 Accepted", {"version": 3})) as (calls, heads):
        assert (await calls.ask("POST", "/conversations/c-1/pause")).json() == {"version": 3}
        assert (len(heads), len(keys_in(heads))) == (3, 1)


async def test_what_a_server_says_itself_is_final() -> None:
    failed = {"code": "transfer_failed", "status": 502, "detail": "The node is gone."}
    async with proxy(answer("502 Bad Gateway", failed)) as (calls, _):
        with pytest.raises(TransferFailed, match="The node is gone"):
            await calls.ask("GET", "/conversations/c-1/patch")
    async with proxy(MISSING) as (calls, _):
        with pytest.raises(ServerUnavailable, match="no problem of Deckhands"):
            await calls.ask("GET", "/conversations/c-1")
