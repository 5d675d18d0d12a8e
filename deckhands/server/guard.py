"""The checks that every request passes before it reaches the application.

Holds: no body is read before the key is checked; every request is limited in length, depth and time; no answer waits
indefinitely for its reader; a page of another site can make no call unless its origin is allowed.
Does not: know routes, except those without a key (including the web page), those that accept files, and streams.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.coordination import MAX_COPY_BYTES, MAX_STORED_FILE_BYTES
from broker.runtime import DeckhandsError
from deckhands.server.auth.api_keys import DEFAULT_BODY_BYTES, AccessDenied
from deckhands.server.gateway import LOOPBACK_NAMES, Gateway, Principal
from deckhands.server.problems import Problem, error_response
from deckhands.server.web.pages import Pages

PUBLIC = frozenset(
    {
        "/health",
        "/ready",
        "/alive",
        "/server_info",
        "/openapi.json",
        "/entries",
        "/.well-known/agent-card.json",
        "/mcp-callback",
    }
)
OPENHANDS = ("/api/", "/sockets/")
"""The paths of OpenHands' API: its clients send the key in a header of their own."""
STREAM = re.compile(r"/conversations/[^/]+/(stream|ws|terminal)")
FILE = re.compile(r"/conversations/[^/]+/files/.*", re.DOTALL)
FORM = re.compile(r"/api/(conversations/[^/]+/)?file/upload")
"""The route of OpenHands that takes a file as a part of a form."""
SHORT = re.compile(r"/conversations(/[^/]+(/(messages|events|events/\d+))?)?")
"""Requests that wait for nothing but the store. Those of one tenant take turns, however many it sends at a time."""
SHORT_READ = re.compile(r"/api/conversations(/[^/]+(/events(/[^/]+)?)?)?")
"""Those of OpenHands' API: its reading ones, because others wait for agents."""
UPLOAD = re.compile(r"/uploads/[^/]+")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})
"""The bodies of all other requests are ignored."""
MAX_DEPTH = 64
MAX_FIELDS = 50
MIN_FILE_BYTES_PER_SECOND = 16 * 1024
PART_BYTES = 64 * 1024
"""The longest part of an answer that is sent at once."""
SUBPROTOCOL = "deckhands.key."
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Possessive, and it matches an unterminated text, so that it is linear on any input."""
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


class Guard:
    """An ASGI middleware that checks every request."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._pages = Pages()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "http":
            send = _limit_send_time(scope, send, 2 * self._gateway.options.slow_seconds)
        send = self._count_refusals(send)
        headers = Headers(scope=scope)
        try:
            self._check_origin(headers)
            if self._pages.has(scope):
                await self._pages(scope, receive, _with_headers(send))
                return
            if self._is_openhands_socket(scope, headers):
                pass  # its first message has the key; see `openhands.sockets`
            elif scope["path"] not in PUBLIC:
                principal = await self._principal(scope, headers)
                state = scope.setdefault("state", {})
                state["principal"] = principal
                if scope["type"] == "http":
                    if (connection := state.get("connection")) is not None:  # a WebSocket counts as a stream
                        self._gateway.connections.hold(connection, principal.tenant)
                    receive = await self._check_body(scope, headers, receive, principal.key.body_bytes)
            elif scope["type"] == "http":
                receive = await self._check_body(scope, headers, receive, DEFAULT_BODY_BYTES)
        except DeckhandsError as error:
            await _refuse(error, scope, receive, send)
            return
        if scope["type"] == "http" and _is_short(scope) and "principal" in scope.get("state", {}):
            await self._take_turn(scope["state"]["principal"].tenant, scope, receive, send)
            return
        await self._app(scope, receive, _with_headers(send))

    async def _take_turn(self, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a short request on in its turn.

        The turn ends before the answer is sent, because its reader may be slow.
        """
        try:
            end = await self._gateway.turns.take(tenant)
        except Problem as error:
            await _refuse(error, scope, receive, send)
            return

        async def forward(message: Message) -> None:
            if message["type"] == "http.response.body":
                end()
            await send(message)

        try:
            await self._app(scope, receive, _with_headers(forward))
        finally:
            end()

    def _count_refusals(self, send: Send) -> Send:
        """Return a send function that counts error answers."""

        async def forward(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = int(message["status"])
                if status >= 400:
                    self._gateway.refusals[str(status), ""] += 1
            await send(message)

        return forward

    def _check_origin(self, headers: Headers) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _name_in(host)
        options = self._gateway.options
        if options.is_loopback and name not in LOOPBACK_NAMES:
            raise Problem(421, "wrong_host", "The Host header does not name this machine.")
        if origin is None or origin in options.origins:
            return
        if origin.partition("://")[2] != host:
            raise AccessDenied("forbidden_origin", "Pages of this origin may not call the server.", remedy="Name it.")

    def _is_openhands_socket(self, scope: Scope, headers: Headers) -> bool:
        """Return whether a request is a socket of OpenHands' whose key is in its first message."""
        is_socket = scope["type"] == "websocket" and scope["path"].startswith("/sockets/")
        return self._gateway.options.openhands and is_socket and not _openhands_token_in(scope, headers)

    async def _principal(self, scope: Scope, headers: Headers) -> Principal:
        gateway = self._gateway
        token = _token_in(headers)
        if not token and gateway.options.openhands and scope["path"].startswith(OPENHANDS):
            token = _openhands_token_in(scope, headers)
        if not token and scope["type"] == "websocket":
            found = [name for name in scope.get("subprotocols", ()) if name.startswith(SUBPROTOCOL)]
            token = found[0].removeprefix(SUBPROTOCOL) if found else ""
        query = _query_in(scope)
        if not token and "ticket" in query and (stream := STREAM.fullmatch(scope["path"])):
            for_terminal = stream[1] == "terminal"
            key_id = await gateway.tickets.take(query["ticket"][0], for_terminal=for_terminal)
            if not key_id:
                what = "a terminal" if for_terminal else "a stream"
                raise AccessDenied("unauthorized", f"The ticket is not valid for {what}.", remedy="Request a new one.")
            key = await gateway.keys.check_id(key_id)
            await gateway.keys.count(key)
            return Principal(key)
        return await gateway.authenticate(token)

    async def _check_body(self, scope: Scope, headers: Headers, receive: Receive, body_bytes: int) -> Receive:
        """Return the source of a request's body. A body that is not a file is read and checked here."""
        is_upload = UPLOAD.fullmatch(scope["path"]) is not None
        is_form = scope["method"] == "POST" and FORM.fullmatch(scope["path"]) is not None
        is_file = is_upload or is_form or FILE.fullmatch(scope["path"]) is not None
        longest = MAX_STORED_FILE_BYTES if is_upload else MAX_COPY_BYTES
        limit = longest if is_form or (is_file and scope["method"] == "PUT") else body_bytes
        declared = headers.get("content-length", "0")
        if declared.isascii() and declared.isdigit() and int(declared) > limit:
            raise _size_problem(limit)
        seconds = self._gateway.options.body_seconds
        if is_file or scope["method"] not in METHODS:
            return _LimitedBody(receive, limit, seconds).receive
        if scope["method"] in ("GET", "HEAD") and declared == "0" and "transfer-encoding" not in headers:
            return receive
        body = await _read_body(_LimitedBody(receive, limit, seconds))
        if body:
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise Problem(415, "unsupported_media_type", "The body is not application/json.")
            check_json(body)
        return replay_body(body, receive)


def _is_short(scope: Scope) -> bool:
    """Return whether a request waits only for the store."""
    is_read = scope["method"] == "GET" and SHORT_READ.fullmatch(scope["path"]) is not None
    return is_read or SHORT.fullmatch(scope["path"]) is not None


class _LimitedBody:
    """The body of a request, which fails if it is too long or arrives too slowly."""

    def __init__(self, receive: Receive, limit: int, seconds: float) -> None:
        self._receive = receive
        self._limit = limit
        self._seconds = seconds
        self._size = 0
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._is_whole = False

    async def receive(self) -> Message:
        """Return the next part of the body."""
        if self._is_whole:
            return await self._receive()
        allowed = self._seconds + self._size / MIN_FILE_BYTES_PER_SECOND
        try:
            async with asyncio.timeout_at(self._began + allowed):
                message = await self._receive()
        except TimeoutError:
            raise Problem(
                408, "body_too_slow", "The body of the request did not arrive in time.", headers={"Connection": "close"}
            ) from None
        self._size += len(message.get("body", b""))
        self._is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        if self._size > self._limit:
            raise _size_problem(self._limit)
        return message


def check_json(body: bytes) -> None:
    """Check that a body is JSON that the rest of the server can process.

    Raises:
        Problem: the body is not such JSON; the text has the reason.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _parse_problem(f"it is not UTF-8 at byte {error.start}") from None
    brackets = _STRINGS.sub(b"", body).translate(None, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    if brackets:
        raise _parse_problem(f"its brackets do not match, or it is nested more than {MAX_DEPTH} deep")
    try:
        json.dumps(json.loads(text, parse_constant=_refuse_constant), ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise _parse_problem("a text has half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise _parse_problem(str(error)[:200]) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _name_in(host: str) -> str | None:
    """Return the name in a `Host` header; None if there is none."""
    try:
        return urlsplit(f"//{host}").hostname if re.fullmatch(r"[\w.:\[\]-]*", host) else None
    except ValueError:
        return None


def _query_in(scope: Scope) -> dict[str, list[str]]:
    try:
        return parse_qs(scope.get("query_string", b"").decode("latin-1"), max_num_fields=MAX_FIELDS)
    except ValueError:
        raise Problem(400, "bad_query", f"The query has more than {MAX_FIELDS} fields.") from None


def _token_in(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _openhands_token_in(scope: Scope, headers: Headers) -> str:
    """Return the key in a request of an OpenHands client; empty if it has none."""
    token = headers.get("x-session-api-key", "")
    if not token and scope["type"] == "websocket":
        token = _query_in(scope).get("session_api_key", [""])[0]
    return token or _token_in(headers)


def _size_problem(limit: int) -> Problem:
    return Problem(
        413,
        "too_large",
        f"The body of the request has more than {limit:,} bytes.",
        remedy="Send less, or put it into a file of the workspace.",
        headers={"Connection": "close"},
    )


def _parse_problem(why: str) -> Problem:
    return Problem(400, "malformed_json", f"The body of the request cannot be read: {why}.")


async def _read_body(limited: _LimitedBody) -> bytes:
    parts = bytearray()
    while True:
        message = await limited.receive()
        if message["type"] != "http.request":
            raise Problem(400, "disconnected", "The client disconnected.")
        parts += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(parts)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that first returns a body that was already read, and then later messages."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _with_headers(send: Send) -> Send:
    async def forward(message: Message) -> None:
        if message["type"] == "http.response.start":
            known = {name for name, _ in message.get("headers", ())}
            more: list[Any] = [header for header in SECURITY_HEADERS if header[0] not in known]
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return forward


def _limit_send_time(scope: Scope, send: Send, limit_seconds: float) -> Send:
    """Return a send function that disconnects a peer that stops reading an answer for too long.

    Streams of events have half that limit, and report it before they end.
    """

    async def forward(message: Message) -> None:
        body = message.get("body", b"")
        for start in range(0, max(len(body), 1), PART_BYTES):
            part = message
            if len(body) > PART_BYTES:
                is_last = start + PART_BYTES >= len(body)
                more = message.get("more_body", False) or not is_last
                part = {**message, "body": body[start : start + PART_BYTES], "more_body": more}
            try:
                async with asyncio.timeout(limit_seconds):
                    await send(part)
            except TimeoutError:
                abort: Callable[[], None] = scope.get("state", {}).get("abort", lambda: None)
                abort()  # the transport discards all further writes
                return

    return forward


async def _refuse(error: DeckhandsError, scope: Scope, receive: Receive, send: Send) -> None:
    answer = error_response(error, scope["path"])
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": error.code})
        return
    await answer(scope, receive, _with_headers(send))
