"""The HTTP clients for MCP servers.

Holds: reading stops at an answer, or an event of an event stream, that exceeds the message limit. A failed request gets
an error as its answer, and the connection stays open for other calls. The client always knows whether the server's
announcements reach us.
Does not: accept compressed answers, because their size is unknown.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

import httpx2
from mcp.client.auth import OAuthFlowError

from broker.runtime import DeckhandsError
from broker.tools import KEY_FIELD, LoginNeeded
from tool_worker.tools.mcp.program import ANSWER_TOO_LONG, MESSAGE_LIMIT_BYTES

EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
FRAME_BYTES = 1024
"""Size of an event besides its message: its name and number."""
CONNECT_SECONDS = 30.0
SILENCE_SECONDS = 300.0
"""A stream of announcements that is silent for this long is reopened, because it may be broken unnoticed."""
NOT_SENT = "the request was not sent"
LOGIN_NEEDED = "a person has to log in"
"""The `data` of an error that a failed request gets as its answer."""
LATE_SECONDS = 30.0
"""Extra time of a request beyond its call, so that the call times out first and notifies the server."""


class AnnouncementListener:
    """Whether a server's announcements reach us.

    Args:
        on_open: Called when a stream of announcements opens, because announcements may have been missed before.
    """

    def __init__(self, on_open: Callable[[], None]) -> None:
        self.is_open = False
        self._on_open = on_open

    def mark_open(self) -> None:
        """Record that a stream has opened."""
        self.is_open = True
        self._on_open()

    def mark_closed(self) -> None:
        """Record that the stream has ended."""
        self.is_open = False


class AddressRefused(httpx2.TransportError):
    """A server's metadata directs a login to an address that its entry does not name."""


NOT_SENT_ERRORS = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, AddressRefused)


class StreamableClient(httpx2.AsyncClient):
    """The client for a server by Streamable HTTP.

    Args:
        call_seconds: The time limit of a call.
        listening: Tracks the stream of announcements.
        auth: Authenticates requests; None if the headers do.
        may_ask: Returns whether a request of a login may go to an address.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        call_seconds: float,
        listening: AnnouncementListener,
        auth: httpx2.Auth | None = None,
        may_ask: Callable[[str], bool] | None = None,
    ) -> None:
        async def check_address(request: httpx2.Request) -> None:
            if may_ask is not None and not may_ask(str(request.url)):
                raise AddressRefused(f"a login at {request.url.scheme}://{request.url.netloc.decode()} is not allowed")

        super().__init__(
            headers={**headers, "Accept-Encoding": "identity"},
            timeout=httpx2.Timeout(CONNECT_SECONDS, read=call_seconds + LATE_SECONDS),
            auth=auth,
            event_hooks={
                "request": [_add_idempotency_key, *([check_address] if auth is not None else [])],
                "response": [_limit_response] if auth is not None else [],  # also of a login
            },
        )
        self._listening = listening

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request. A failed request is answered with an error, because the SDK would drop the connection."""
        is_listening = request.method == "GET"
        if is_listening or request.headers.get("mcp-method") == "subscriptions/listen":
            limits = request.extensions.get("timeout", {})
            request.extensions = {**request.extensions, "timeout": {**limits, "read": SILENCE_SECONDS}}
        try:
            response = await super().send(request, **options)
        except (httpx2.TransportError, DeckhandsError, OAuthFlowError) as error:
            if request.method != "POST":
                raise
            return _make_failure_response(request, error)
        stream = cast("httpx2.AsyncByteStream", response.stream)
        if is_listening:
            is_events = response.is_success and _is_events(response.headers)
            response.stream = _AnnouncementStream(stream, response.headers, self._listening if is_events else None)
            return response
        response.stream = _AnswerStream(stream, response.headers)
        if response.status_code == httpx2.codes.NOT_FOUND and "mcp-session-id" in request.headers:
            # The SDK would pass on a JSON error as it is, and the end of the session would go unnoticed.
            response.headers["content-type"] = "text/plain"
        return response


def make_limited_client(
    headers: Mapping[str, str] | None = None,
    timeout: httpx2.Timeout | float | None = None,
    auth: httpx2.Auth | None = None,
) -> httpx2.AsyncClient:
    """Return the client for a server by the older transport; `timeout` in seconds."""
    return httpx2.AsyncClient(
        headers={**(headers or {}), "Accept-Encoding": "identity"},
        timeout=timeout,
        auth=auth,
        event_hooks={"request": [_add_idempotency_key], "response": [_limit_response]},
    )


async def _add_idempotency_key(request: httpx2.Request) -> None:
    """Repeat the key of a call as a header, for proxies and servers that read no `_meta`.

    The agent chooses the call's arguments, so the key is taken only from its own field of the message.
    """
    if request.method == "POST" and KEY_FIELD.encode() in request.content:
        key = (json.loads(request.content).get("params") or {}).get("_meta", {}).get(KEY_FIELD)
        if isinstance(key, str):
            request.headers["Idempotency-Key"] = key


async def _limit_response(response: httpx2.Response) -> None:
    response.stream = _LimitedStream(cast("httpx2.AsyncByteStream", response.stream), response.headers)


def _is_events(headers: httpx2.Headers) -> bool:
    return headers.get("content-type", "").lower().startswith("text/event-stream")


def _make_failure_response(request: httpx2.Request, error: Exception) -> httpx2.Response:
    """Return an error response for a failed request."""
    from mcp.types import CONNECTION_CLOSED

    message = json.loads(request.content)
    if "id" not in message:
        return httpx2.Response(httpx2.codes.ACCEPTED, request=request)
    failure: dict[str, Any] = {"code": CONNECTION_CLOSED, "message": f"{type(error).__name__}: {error}"}
    if isinstance(error, LoginNeeded):
        failure["data"] = LOGIN_NEEDED
    elif not isinstance(error, httpx2.TransportError) or isinstance(error, NOT_SENT_ERRORS):
        failure["data"] = NOT_SENT
    return httpx2.Response(
        httpx2.codes.OK, json={"jsonrpc": "2.0", "id": message["id"], "error": failure}, request=request
    )


class _LimitedStream(httpx2.AsyncByteStream):
    """A server's answer with a size limit."""

    def __init__(self, answer: httpx2.AsyncByteStream, headers: httpx2.Headers) -> None:
        self._answer = answer
        self._is_compressed = headers.get("content-encoding", "identity").lower() != "identity"
        self._is_events = _is_events(headers)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        # The SDK turns these errors into the answer of this stream's call, and of no other.
        refusal = httpx2.SSEError if self._is_events else httpx2.StreamError
        if self._is_compressed:
            raise refusal("the server has compressed its answer, though it was asked not to")
        limit = MESSAGE_LIMIT_BYTES + (FRAME_BYTES if self._is_events else 0)
        size, before = 0, b""
        async for chunk in self._answer:
            size += len(chunk)
            if self._is_events:
                seen = before + chunk
                before = seen[-3:]
                end = max(seen.rfind(mark) for mark in EVENT_ENDS)
                size = len(seen) - end if end >= 0 else size
            if size > limit:
                raise refusal(ANSWER_TOO_LONG)
            yield chunk

    async def aclose(self) -> None:
        await self._answer.aclose()


class _AnswerStream(_LimitedStream):
    """The answer to a request; a broken connection becomes an error for this request only."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in super().__aiter__():
                yield chunk
        except httpx2.SSEError:
            raise
        except httpx2.TransportError as error:
            if self._is_events:
                raise  # the SDK may resume the stream where it broke
            raise httpx2.StreamError(f"the connection broke: {type(error).__name__}") from error


class _AnnouncementStream(_LimitedStream):
    """The stream of announcements, if it is one. A break counts as its end, because the SDK reopens it after an end."""

    def __init__(
        self, answer: httpx2.AsyncByteStream, headers: httpx2.Headers, listening: AnnouncementListener | None
    ) -> None:
        super().__init__(answer, headers)
        self._listening = listening

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._listening is None:
            async for chunk in super().__aiter__():
                yield chunk
            return
        self._listening.mark_open()
        try:
            async for chunk in super().__aiter__():
                yield chunk
        except httpx2.SSEError:
            raise
        except httpx2.TransportError:
            return
        finally:
            self._listening.mark_closed()
