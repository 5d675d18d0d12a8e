"""Streams over HTTP: server-sent events and WebSocket.

Holds: the id of an event is the id of its message, so a reader resumes with `Last-Event-ID` or `after=`, at any server.
A reader that reads nothing for too long is dropped with the code `slow_reader`; its unread data is not buffered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Header, Query, Request, WebSocket
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from broker.runtime import DeckhandsError, EventsLost, UnknownConversation
from deckhands.client import NotSettled
from deckhands.server.auth.tickets import TICKET_SECONDS
from deckhands.server.conversations import ReadableId, result_of, settled_result
from deckhands.server.dependencies import MAX_EVENT_ID, GatewayOf, Reader
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.guard import SUBPROTOCOL
from deckhands.server.models import ConversationResult, NewTicket, Ticket
from deckhands.server.problems import to_problem
from deckhands.server.streams import EventStream, Item, SlowReader, reserve_stream

routes = APIRouter(tags=["streams"])
PROTOCOL = "deckhands"
RETRY_MS = 1_000
HEAD = f"retry: {RETRY_MS}\n\n".encode()
ALIVE = b": alive\n\n"
STREAM_HEADERS = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}
CLOSE_CODES = {
    "server_stopping": 1012,
    "slow_reader": 1013,
    "too_many_streams": 1013,
    "too_many_streams_of_key": 1013,
    "too_many_streams_of_tenant": 1013,
    "unauthorized": 4401,
    "key_revoked": 4401,
    "key_expired": 4401,
    "unknown_conversation": 4404,
    "events_lost": 4409,
}
"""Close codes of WebSockets, by the code of the problem; all others are 1011, and a normal end is 1000."""


def sse(item: Item) -> bytes:
    """Return an item as a server-sent event."""
    text = json.dumps(item.content, ensure_ascii=False, separators=(",", ":"))
    head = f"id: {item.id}\n" if item.kind == "event" else f"event: {item.kind}\n"
    return f"{head}data: {text}\n\n".encode("utf-8", "replace")


class Batches(Protocol):
    """A source of items for one reader."""

    def batches(self) -> AsyncGenerator[list[Item]]:
        """Yield items as they arrive; an empty batch is a keep-alive."""
        ...


class SseResponse(Response):
    """An answer that is a stream of server-sent events."""

    media_type = "text/event-stream"

    def __init__(
        self,
        gateway: Gateway,
        stream: Batches,
        headers: Mapping[str, str] | None = None,
        *,
        head: bytes = HEAD,
        written: Callable[[Item], bytes] = sse,
    ) -> None:
        super().__init__(headers={**STREAM_HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._gateway = gateway
        self._stream = stream
        self._written = written
        self._head = head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the stream until it ends or the reader disconnects."""
        abort: Callable[[], None] = scope.get("state", {}).get("abort", lambda: None)
        writing = asyncio.create_task(self._write(send, abort))
        await _until_one_ends(writing, asyncio.create_task(_until_gone(receive)))
        if not writing.cancelled() and (error := writing.exception()) is not None:
            raise error

    async def _write(self, send: Send, abort: Callable[[], None]) -> None:
        limit = self._gateway.options.slow_seconds
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._head, "more_body": True})

        async def write(chunk: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": chunk, "more_body": more})

        async with contextlib.aclosing(self._stream.batches()) as batches:
            async for batch in batches:
                chunk = b"".join(map(self._written, batch)) or ALIVE
                if await finishes_in_time(write(chunk), limit):
                    continue
                last = self._written(Item("problem", to_problem(SlowReader())))
                if not await finishes_in_time(write(last, more=False), limit):
                    abort()
                return
        await finishes_in_time(write(b"", more=False), limit)


async def finishes_in_time(writing: Awaitable[Any], limit_seconds: float) -> bool:
    """Return whether a write finished within the limit."""
    try:
        async with asyncio.timeout(limit_seconds):
            await writing
    except TimeoutError:
        return False
    return True


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def wait_until_settled(
    gateway: Gateway, request: Request, conversation_id: str, *, timeout_seconds: float
) -> ConversationResult:
    """Wait until a conversation has settled or the client has disconnected, and return its result so far.

    The wait counts as a stream.

    Args:
        request: its body must have been read.
    """
    wait = gateway.follower.wait_until_settled(conversation_id, timeout_seconds=timeout_seconds)
    waiting, leaving = asyncio.create_task(wait), asyncio.create_task(_until_gone(request.receive))
    principal: Principal = request.state.principal
    if asyncio.current_task() not in gateway.streams:
        gateway.streams[waiting] = principal.key
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            with contextlib.suppress(NotSettled):
                return settled_result(conversation_id, waiting.result())
        return await result_of(gateway.client, conversation_id)
    finally:
        gateway.streams.pop(waiting, None)
        for task in (waiting, leaving):
            task.cancel()
        await asyncio.gather(waiting, leaving, return_exceptions=True)


async def check_position(gateway: Gateway, principal: Principal, conversation_id: str, after: int) -> None:
    """Check that a stream can start after an event.

    Raises:
        UnknownConversation: no such conversation.
        EventsLost: its log ends before that event.
        Problem: too many streams are open.
    """
    reserve_stream(gateway, principal)
    try:
        last_id = await gateway.client.log.load_last_id(conversation_id)
    except UnknownConversation:
        if not await gateway.client.is_archived(conversation_id):
            raise
        return
    if after > last_id:
        raise EventsLost(conversation_id, last_id, after)


class StreamQuery:
    """The query of a stream request."""

    def __init__(
        self,
        after: Annotated[int, Query(ge=0, le=MAX_EVENT_ID, description="the last event that the reader has")] = 0,
        deltas: Annotated[bool, Query(description="also send pieces of the current reply")] = False,
        until: Annotated[
            str,
            Query(
                pattern="^(settled)?$",
                description="`settled`: end the stream, with a summary, when the conversation has settled",
            ),
        ] = "",
        whole: Annotated[bool, Query(description="long texts are sent in full, not only their head and tail")] = False,
        ticket: Annotated[str, Query(max_length=100, description="replaces a key, see `POST /tickets`")] = "",  # noqa: ARG002  (the guard takes it)
    ) -> None:
        self.after = after
        self.deltas = deltas
        self.is_until_settled = bool(until)
        self.is_whole = whole


@routes.get(
    "/conversations/{conversation_id}/stream",
    response_class=Response,
    responses={
        200: {"content": {"text/event-stream": {"example": 'id: 2\ndata: {"id":2,"kind":"action.message"}\n\n'}}}
    },
    summary="Follow a conversation (server-sent events)",
)
async def follow(
    gateway: GatewayOf,
    principal: Reader,
    conversation_id: ReadableId,
    wanted: Annotated[StreamQuery, Depends()],
    last_event_id: Annotated[int | None, Header(alias="Last-Event-ID", ge=0, le=MAX_EVENT_ID)] = None,
) -> Response:
    """Follow the log as it grows. Messages without a name are events, and their ids are those of the events.

    `delta` is a piece of a reply, `problem` says why the stream ends (resume if it is retryable), and `end` means that
    nothing more follows.
    """
    after = wanted.after if last_event_id is None else last_event_id
    await check_position(gateway, principal, conversation_id, after)
    stream = EventStream(
        gateway,
        principal,
        conversation_id,
        after=after,
        deltas=wanted.deltas,
        until_settled=wanted.is_until_settled,
        is_whole=wanted.is_whole,
    )
    return SseResponse(gateway, stream)


@routes.websocket("/conversations/{conversation_id}/ws")
async def follow_ws(
    socket: WebSocket,
    gateway: GatewayOf,
    principal: Reader,
    conversation_id: ReadableId,
    wanted: Annotated[StreamQuery, Depends()],
) -> None:
    """Follow the log over a WebSocket: each message is `{"type", "id", "content"}`, as in the other stream."""
    try:
        await check_position(gateway, principal, conversation_id, wanted.after)
    except DeckhandsError as error:
        await socket.accept(subprotocol=_subprotocol(socket))
        await socket.close(CLOSE_CODES.get(error.code, 1011), error.code)
        return
    await socket.accept(subprotocol=_subprotocol(socket))
    stream = EventStream(
        gateway,
        principal,
        conversation_id,
        after=wanted.after,
        deltas=wanted.deltas,
        until_settled=wanted.is_until_settled,
        is_whole=wanted.is_whole,
    )
    await _until_one_ends(
        asyncio.create_task(_write_ws(socket, gateway, stream)), asyncio.create_task(_read_ws(socket))
    )


async def _until_one_ends(writing: asyncio.Task[None], reading: asyncio.Task[None]) -> None:
    """Wait until the writer or the reader of a stream has ended, and cancel the other."""
    try:
        await asyncio.wait((writing, reading), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (writing, reading):
            task.cancel()
        await asyncio.gather(writing, reading, return_exceptions=True)


async def _write_ws(socket: WebSocket, gateway: Gateway, stream: EventStream) -> None:
    limit = gateway.options.slow_seconds
    code = 1000
    reason = ""
    async with contextlib.aclosing(stream.batches()) as batches:
        async for batch in batches:
            for item in batch:
                message = {"type": item.kind, "id": item.id or None, "content": item.content}
                if not await finishes_in_time(socket.send_text(json.dumps(message, ensure_ascii=False)), limit):
                    code = CLOSE_CODES[SlowReader.code]
                    reason = SlowReader.code
                    break
                if item.kind == "problem":
                    reason = str(item.content["code"])
                    code = CLOSE_CODES.get(reason, 1011)
            if code != 1000:
                break
    if not await finishes_in_time(socket.close(code, reason), limit):
        socket.scope.get("state", {}).get("abort", lambda: None)()


async def _read_ws(socket: WebSocket) -> None:
    """Wait until the reader disconnects. Its messages are ignored."""
    try:
        while True:
            await socket.receive_text()
    except (WebSocketDisconnect, KeyError):
        return


def _subprotocol(socket: WebSocket) -> str | None:
    """Return the negotiated subprotocol; never the one that carries a key."""
    offered = socket.scope.get("subprotocols", ())
    return PROTOCOL if PROTOCOL in offered and not PROTOCOL.startswith(SUBPROTOCOL) else None


@routes.post("/tickets", status_code=201, summary="Get a ticket for one stream")
async def ticket(gateway: GatewayOf, principal: Reader, asked: NewTicket | None = None) -> Ticket:
    """Issue a ticket that opens one stream, for pages in browsers: they cannot send the key in a header.

    A terminal needs one with the purpose `terminal`, which opens nothing else.
    """
    for_terminal = asked is not None and asked.purpose == "terminal"
    issued = await gateway.tickets.issue(principal.key.id, for_terminal=for_terminal)
    return Ticket(ticket=issued, expires_in_seconds=TICKET_SECONDS)
