"""The events of a conversation over OpenHands' WebSocket, live.

A socket is authenticated by its first message, or by the key in its query or its header. The server first sends the
whole state, then the requested past events, then each new event.

Holds: no event between the first message and the end of the socket is left out, and none comes twice. After the last
event of a run comes the whole state, as it is then. If the agent's model has `stream`, the text of each reply comes
before its events, as it is written.
Does not: send a whole state for a held conversation: a client that has just asked for a run would take it for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, WebSocket
from starlette.websockets import WebSocketDisconnect

from broker.contract import ModelReply
from broker.runtime import Clock, DeckhandsError, OutcomeUnknown, StoreUnavailable, new_key
from deckhands.server.auth.api_keys import AccessDenied, Scope
from deckhands.server.dependencies import GatewayOf
from deckhands.server.gateway import Gateway, Principal
from deckhands.server.guard import check_json
from deckhands.server.live import CLOSE_CODES, check_position, finishes_in_time
from deckhands.server.openhands import running
from deckhands.server.openhands.conversation_ids import find_conversation
from deckhands.server.openhands.events import format_moment
from deckhands.server.openhands.parts import OpenHandsParts, Parts
from deckhands.server.openhands.reply_deltas import ReplyDeltas
from deckhands.server.openhands.requests import SentMessage
from deckhands.server.openhands.translated_logs import TranslatedLog
from deckhands.server.problems import Problem
from deckhands.server.streams import EventStream, SlowReader

_log = logging.getLogger(__name__)
routes = APIRouter(prefix="/sockets", tags=["openhands-sockets"])
KEY_SECONDS = 10.0
"""How long the first message, which has the key, may take."""
MAX_UNAUTHENTICATED = 1_000
"""How many sockets may be waiting for it at once."""
BUSY = "too_many_streams"
FAILED, UNKNOWN = 4001, 4004
"""Close codes that end a client's attempts: the key is not valid, and there is no such conversation."""
_CLOSE_CODES = {4401: FAILED, 4404: UNKNOWN}


class SocketQuery:
    """The query of a socket."""

    def __init__(
        self,
        session_api_key: Annotated[str | None, Query(max_length=200, description="the key")] = None,
        resend_mode: Annotated[Literal["all", "since"] | None, Query(description="which past events to send")] = None,
        after_timestamp: Annotated[
            datetime | None, Query(description="the time of the first past event to send, for `since`")
        ] = None,
        resend_all: Annotated[bool, Query(deprecated=True)] = False,
    ) -> None:
        self.key = session_api_key
        self.mode = resend_mode or ("all" if resend_all else None)
        self.first = format_moment(after_timestamp) or ""


async def authenticate(socket: WebSocket, gateway: Gateway, parts: OpenHandsParts) -> Principal | None:
    """Accept a socket, and return the principal of its key; None if the socket was closed because it has no valid key.

    The guard has already checked a key in the query or the header; otherwise, the first message must have the key.
    """
    await socket.accept()
    principal: Principal | None = socket.scope.get("state", {}).get("principal")
    try:
        if principal is None:
            principal = await gateway.authenticate(await _receive_key(socket, parts))
        principal.require(Scope.READ)
    except (DeckhandsError, TimeoutError) as error:
        code = error.code if isinstance(error, DeckhandsError) else "unauthorized"
        is_busy = code == BUSY or (isinstance(error, DeckhandsError) and error.retryable)
        await socket.close(1013 if is_busy else FAILED, code)
        return None
    return principal


async def _receive_key(socket: WebSocket, parts: OpenHandsParts) -> str:
    """Return the key of the first message.

    Raises:
        Problem: too many sockets have not sent a key yet.
        AccessDenied: the client has left.
        TimeoutError: the message has not arrived in time.
    """
    if parts.unauthenticated >= MAX_UNAUTHENTICATED:
        raise Problem(503, BUSY, "Too many sockets have sent no key yet.", remedy="Send it in the header.")
    parts.unauthenticated += 1
    try:
        async with asyncio.timeout(KEY_SECONDS):
            text = await _receive_text(socket)
    finally:
        parts.unauthenticated -= 1
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict) and found.get("type") == "auth" and isinstance(found.get("session_api_key"), str):
            return str(found["session_api_key"])
    return ""


async def _receive_text(socket: WebSocket) -> str:
    """Return the next message; empty if it is not a text.

    Raises:
        AccessDenied: the client has left.
    """
    try:
        return await socket.receive_text()
    except KeyError:
        return ""
    except WebSocketDisconnect:
        raise AccessDenied("unauthorized", "The client has left.") from None


@routes.websocket("/events/{conversation_id}")
async def follow(
    socket: WebSocket, gateway: GatewayOf, parts: Parts, conversation_id: str, wanted: Annotated[SocketQuery, Depends()]
) -> None:
    """Follow a conversation: each message is an event. Messages of the client are messages to the agent."""
    principal = await authenticate(socket, gateway, parts)
    if principal is None:
        return
    try:
        known = await find_conversation(gateway, principal, conversation_id)
        await check_position(gateway, principal, known, 0)
        has_deltas = bool((await parts.logs.load(gateway.client, known)).run.agent.llm.stream)
    except DeckhandsError as error:
        code = CLOSE_CODES.get(error.code, 1011)
        await socket.close(_CLOSE_CODES.get(code, code), error.code)
        return
    # made here, in the task whose place `check_position` has reserved
    stream = EventStream(gateway, principal, known, is_whole=True, deltas=has_deltas)
    follower = _Follower(socket, gateway, parts, principal, conversation_id=known, wanted=wanted)
    await close_on_failure(socket, await run_until_one_ends(follower.write(stream), follower.read()))


async def run_until_one_ends(*parts: Any) -> BaseException | None:
    """Run coroutines until one of them ends, cancel the others, and return the error of a failed one."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next((error for task in ended if (error := task.exception()) is not None), None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def close_on_failure(socket: WebSocket, error: BaseException | None) -> None:
    """Close a socket after an error, and log the reason; no effect without an error."""
    if error is None or isinstance(error, WebSocketDisconnect):
        return
    is_retryable = isinstance(error, DeckhandsError) and error.retryable
    _log.error("a socket failed: %s", error, exc_info=None if is_retryable else error)
    code = error.code if isinstance(error, DeckhandsError) else "internal_error"
    with contextlib.suppress(RuntimeError):  # it is closed already
        await socket.close(1013 if is_retryable else 1011, code)


class _Follower:
    """One socket to one conversation."""

    def __init__(
        self,
        socket: WebSocket,
        gateway: Gateway,
        parts: OpenHandsParts,
        principal: Principal,
        *,
        conversation_id: str,
        wanted: SocketQuery,
    ) -> None:
        self._socket = socket
        self._gateway = gateway
        self._parts = parts
        self._principal = principal
        self._conversation_id = conversation_id
        self._wanted = wanted
        self._log = TranslatedLog(conversation_id)
        self._deltas = ReplyDeltas(gateway.store.clock)
        self._nudge = asyncio.Event()
        self._sending = asyncio.Lock()

    async def read(self) -> None:
        """Send the client's messages to the agent until the client disconnects."""
        while True:
            try:
                text = await self._socket.receive_text()
            except (WebSocketDisconnect, KeyError):
                return
            try:
                check_json(text.encode())
                sent = json.loads(text)
                if isinstance(sent, dict) and sent.get("type") == "auth":
                    continue
                self._principal.require(Scope.WRITE)
                await self._gateway.recheck(self._principal)
                await self._gateway.keys.count(self._principal.key)
                message = SentMessage.model_validate(sent).model_copy(update={"run": True})
                await running.send_message(self._gateway, self._parts, self._principal, self._conversation_id, message)
            except (DeckhandsError, ValueError) as error:
                code = error.code if isinstance(error, DeckhandsError) else "invalid_request"
                detail = str(error) if isinstance(error, DeckhandsError) else "The message cannot be used."
                await self._send(make_server_error(self._gateway.store.clock, code, detail))

    async def write(self, stream: EventStream) -> None:
        """Send the items of a stream until it ends."""
        known = await self._gateway.client.last_id(self._conversation_id)
        nudges = self._parts.nudges[self._conversation_id]
        nudges.add(self._nudge)
        try:
            async with contextlib.aclosing(stream.batches()) as batches:
                code, reason = await self._write_batches(batches, known)
        finally:
            nudges.discard(self._nudge)
            if not nudges:
                self._parts.nudges.pop(self._conversation_id, None)
        limit = self._gateway.options.slow_seconds
        if not await finishes_in_time(self._socket.close(code, reason), limit):
            abort: Callable[[], None] = self._socket.scope.get("state", {}).get("abort", lambda: None)
            abort()

    async def _write_batches(self, batches: AsyncGenerator[list[Any]], known: int) -> tuple[int, str]:
        """Send the items of a stream, and return the code and the reason to close with."""
        past: list[dict[str, Any]] = []
        is_live = False
        coming = asyncio.ensure_future(anext(batches, None))
        nudged = asyncio.ensure_future(self._nudge.wait())
        try:
            while True:
                await asyncio.wait((coming, nudged), return_when=asyncio.FIRST_COMPLETED)
                ready: list[dict[str, Any]] = []
                if nudged.done():
                    self._nudge.clear()
                    nudged = asyncio.ensure_future(self._nudge.wait())
                    ready += [self._log.snapshot()] if is_live else []
                end = None
                if coming.done():
                    batch = coming.result()
                    for item in batch or ():
                        if item.kind == "delta":
                            ready += self._deltas.add_piece(item.content) if is_live else []
                            continue
                        if item.event is None:
                            end = item
                            break
                        rest = self._deltas.add_reply(item.event) if isinstance(item.event, ModelReply) else []
                        made = self._log.add(item.event)
                        if is_live:
                            ready += [*(rest if self._log.run.agent.llm.stream else ()), *made]
                            ready += [self._log.snapshot()] if self._log.ends_run(item.event) else []
                            continue
                        past += [event for event in made if self._is_wanted(event)]
                        if item.event.id >= known:
                            is_live = True
                            ready += [self._log.snapshot(), *past]
                            past = []
                    if batch is None:
                        return 1000, ""
                    coming = asyncio.ensure_future(anext(batches, None))
                for event in ready:
                    if not await self._send(event):
                        return 1013, SlowReader.code
                if end is not None and end.kind == "end":  # archived; a client that is closed would connect again
                    return await self._stay_open()
                if end is not None:
                    return _find_close_code(end)
        finally:
            coming.cancel()
            nudged.cancel()
            await asyncio.gather(coming, nudged, return_exceptions=True)

    async def _stay_open(self) -> tuple[int, str]:
        """Wait until the server stops or the key is no longer valid, and return the code and the reason."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._gateway.options.quiet_seconds):
                    await self._gateway.is_stopping.wait()
                    return CLOSE_CODES["server_stopping"], "server_stopping"
            try:
                await self._gateway.recheck(self._principal)
            except (StoreUnavailable, OutcomeUnknown):
                continue
            except DeckhandsError as error:
                code = CLOSE_CODES.get(error.code, 1011)
                return _CLOSE_CODES.get(code, code), error.code

    def _is_wanted(self, event: dict[str, Any]) -> bool:
        """Return whether a past event was asked for."""
        if self._wanted.mode == "since":
            return bool(self._wanted.first) and event["timestamp"] >= self._wanted.first
        return self._wanted.mode == "all"

    async def _send(self, event: dict[str, Any]) -> bool:
        """Send an event, and return whether the client has received it in time."""
        text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        async with self._sending:
            sending = self._socket.send_text(text.encode("utf-8", "replace").decode())
            return await finishes_in_time(sending, self._gateway.options.slow_seconds)


def _find_close_code(end: Any) -> tuple[int, str]:
    """Return the close code and the reason for the problem that ends a stream."""
    reason = str(end.content["code"])
    code = CLOSE_CODES.get(reason, 1011)
    return _CLOSE_CODES.get(code, code), reason


def make_server_error(clock: Clock, code: str, detail: str) -> dict[str, Any]:
    """Return the event that reports why a client's message was not taken."""
    return {
        "kind": "ServerErrorEvent",
        "id": new_key(),
        "timestamp": format_moment(clock.now()),
        "source": "environment",
        "code": code,
        "detail": detail,
    }
