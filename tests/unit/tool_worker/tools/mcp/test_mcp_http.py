"""What an MCP server may answer by HTTP, however its answer is cut."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest

from tool_worker.tools.mcp.http_connection import (
    EVENT_ENDS,
    LATE_SECONDS,
    SILENCE_SECONDS,
    AnnouncementListener,
    StreamableClient,
    make_limited_client,
)
from tool_worker.tools.mcp.program import MESSAGE_LIMIT_BYTES


class Pieces(httpx2.AsyncByteStream):
    def __init__(self, event: bytes, end: bytes, count: int) -> None:
        self._pieces = [event, *(bytes([byte]) for byte in end)]
        self._count = count

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self._count):
            for piece in self._pieces:
                yield piece


async def received_bytes(answer: Pieces) -> int:
    headers = {"Content-Type": "text/event-stream"}
    async with make_limited_client() as client:
        client._transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, stream=answer))
        async with client.stream("GET", "http://server.example/sse") as response:
            return sum([len(chunk) async for chunk in response.aiter_raw()])


@pytest.mark.parametrize("end", EVENT_ENDS)
async def test_many_events_may_be_longer_than_one_may_be(end: bytes) -> None:
    event = b"data: " + b"x" * 2**20
    assert await received_bytes(Pieces(event, end, 20)) == 20 * len(event + end) > MESSAGE_LIMIT_BYTES


async def test_one_event_may_not() -> None:
    with pytest.raises(httpx2.SSEError, match="more than"):
        await received_bytes(Pieces(b"data: " + b"x" * 2**20, b"\n", 20))


@pytest.mark.parametrize(("method", "limit"), [("GET", SILENCE_SECONDS), ("POST", 1.0 + LATE_SECONDS)])
async def test_call_limit_does_not_end_the_announcement_stream(method: str, limit: float) -> None:
    seen: list[float] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.extensions["timeout"]["read"])
        return httpx2.Response(200, json={})

    async with StreamableClient({}, 1.0, AnnouncementListener(lambda: None)) as client:
        client._transport = httpx2.MockTransport(answer)
        await client.request(method, "http://server.example/mcp", json={})
    assert seen == [limit]
