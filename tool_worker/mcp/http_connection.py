"""The HTTP client for an MCP server.

Holds: an answer, or one event of a stream of events, that is longer than a message may be breaks off its reading.
Does not: take compressed answers, of which nobody knows how long they are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import cast

import httpx2

from tool_worker.mcp.program import MESSAGE_LIMIT_BYTES

EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


def bounded_client(
    headers: Mapping[str, str] | None = None,
    timeout: httpx2.Timeout | float | None = None,
    auth: httpx2.Auth | None = None,
) -> httpx2.AsyncClient:
    """Return a client; `timeout` in seconds."""
    return httpx2.AsyncClient(
        headers={**(headers or {}), "Accept-Encoding": "identity"},
        timeout=timeout,
        auth=auth,
        event_hooks={"response": [_bound]},
    )


async def _bound(response: httpx2.Response) -> None:
    response.stream = _Bounded(cast("httpx2.AsyncByteStream", response.stream), response.headers)


class _Bounded(httpx2.AsyncByteStream):
    """What a server answers, as long as it keeps within the limit."""

    def __init__(self, answer: httpx2.AsyncByteStream, headers: httpx2.Headers) -> None:
        self._answer = answer
        self._is_compressed = headers.get("content-encoding", "identity").lower() != "identity"
        self._is_events = headers.get("content-type", "").lower().startswith("text/event-stream")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._is_compressed:
            raise httpx2.StreamError("the server has compressed its answer, though it was asked not to")
        size, before = 0, b""
        async for chunk in self._answer:
            size += len(chunk)
            if self._is_events:
                seen = before + chunk
                before = seen[-3:]
                end = max(seen.rfind(mark) for mark in EVENT_ENDS)
                size = len(seen) - end if end >= 0 else size
            if size > MESSAGE_LIMIT_BYTES:
                raise httpx2.StreamError(f"the server's message has more than {MESSAGE_LIMIT_BYTES} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._answer.aclose()
