"""A server as a program: its address, its checks at the start, and its shutdown.

Holds: without keys, it listens only on this machine, and serves only public paths; a connection whose request head
arrives too slowly is closed; on shutdown, every stream is closed with a code. Requests refused here, before the
application sees them, are counted by reason, and so are failed TLS handshakes. A request that a proxy could parse
differently is refused: with both lengths, with chunks in HTTP/1.0, or with a line that does not end in CR LF.
Does not: count peers that leave before the end of a handshake, or never start one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import resource
import socket
import ssl
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Any

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from broker.runtime import UsageError
from deckhands.server.application import with_guard
from deckhands.server.gateway import Gateway, Refusal, ServerOptions

MAX_HEAD_BYTES = 16 * 1024
MAX_MESSAGE_BYTES = 4 * 1024
HEAD_TOO_LARGE = 431
"""h11's status for a head that is too long."""
KEEP_ALIVE_SECONDS = 30
ENDING_SECONDS = 5
BARE_LF = re.compile(rb"(?<!\r)\n")
BACKLOG = 2_048
COLLECTED = (10_000, 20, 50)
"""Thresholds of the garbage collector: new objects, then collections of the younger generation before an older one."""
CROWDED = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 2\r\nContent-Length: 0\r\n\r\n"
TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

_log = logging.getLogger(__name__)


class _StrictLines(ReceiveBuffer):
    """A receive buffer in which every line of heads and trailers must end in CR LF."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines up to an empty one; None if it has not arrived yet."""
        before = bytes(self._data)
        lines = super().maybe_extract_lines()
        if lines is not None and BARE_LF.search(before, 0, len(before) - len(self._data)):
            raise h11.RemoteProtocolError("a line ends in LF without CR")
        return lines


class _StrictConnection(h11.Connection):
    """The parser of a connection; it refuses requests with an ambiguous end."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(h11.SERVER, limit_bytes)
        self._receive_buffer = _StrictLines()

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            RemoteProtocolError: the peer sent something that is not HTTP, or is ambiguous.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("Content-Length or HTTP/1.0 with Transfer-Encoding")
        return event


def make_protocol(gateway: Gateway) -> type[H11Protocol]:
    """Return the protocol class of connections, with a time limit for the head of a request.

    Connections and requests that are refused here are counted in the gateway's refusals.
    """
    head_seconds, refusals = gateway.options.head_seconds, gateway.refusals

    class Connection(H11Protocol):
        """One connection."""

        _timer: asyncio.TimerHandle | None = None
        _seen: Any = None

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.conn = _StrictConnection(MAX_HEAD_BYTES)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Start the time limit of the first head."""
            super().connection_made(transport)
            if len(self.connections) > gateway.options.max_connections:
                refusals["503", "too_many_connections"] += 1
                transport.write(CROWDED)
                transport.close()
                return
            self._timer = self.loop.call_later(head_seconds, self._give_up)

        def data_received(self, data: bytes) -> None:
            """Receive data. The first part of another head starts its time limit."""
            super().data_received(data)
            if self.scope is not None and self.scope is not self._seen:
                self._seen = self.scope
                self.scope.setdefault("state", {}).update(abort=self.transport.abort, connection=self)
                self._stop_timer()
            elif self._timer is None and (self.cycle is None or self.cycle.response_complete):
                self._timer = self.loop.call_later(head_seconds, self._give_up)

        def send_400_response(self, msg: str) -> None:
            """Refuse data that is not HTTP. Called while the parser's error is handled."""
            error = sys.exception()
            reason = "malformed_head"
            if self.cycle is not None and not self.cycle.response_complete:
                reason = "malformed_body"
            elif isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == HEAD_TOO_LARGE:
                reason = "head_too_large"
            refusals["400", reason] += 1
            super().send_400_response(msg)
            if self.cycle is not None:  # a second response would raise in the application
                self.cycle.disconnected = True
                self.cycle.message_event.set()

        def connection_lost(self, exc: Exception | None) -> None:
            """Stop the time limit."""
            self._stop_timer()
            gateway.connections.release(self)
            super().connection_lost(exc)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            self._timer = None
            if self.cycle is None or self.cycle.response_complete:
                refusals["408", "head_too_slow"] += 1
                self.transport.write(TIMEOUT)
                self.transport.close()

    return Connection


def make_socket_protocol(refusals: Counter[Refusal]) -> type[WebSocketsSansIOProtocol]:
    """Return the protocol class of WebSockets.

    Args:
        refusals: counts the requests refused here.
    """

    class SocketConnection(WebSocketsSansIOProtocol):
        """One WebSocket, which the application can disconnect."""

        def handle_connect(self, event: Any) -> None:
            """Give the application a function that disconnects this socket."""
            super().handle_connect(event)
            if getattr(self, "scope", None) is not None:
                self.scope.setdefault("state", {})["abort"] = self.transport.abort
            else:
                refusals[str(self.response.status_code), "malformed_handshake"] += 1

    return SocketConnection


def make_tls_class(refusals: Counter[Refusal]) -> type[ssl.SSLObject]:
    """Return the TLS socket class of connections.

    Args:
        refusals: counts failed handshakes.
    """

    class CountedHandshake(ssl.SSLObject):
        """The TLS of one connection."""

        def do_handshake(self) -> None:
            """Perform a step of the handshake."""
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError:
                refusals["", "tls_handshake"] += 1
                raise

    return CountedHandshake


class GatewayServer(uvicorn.Server):
    """A server that ends its streams before it waits for its connections to close."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then shut down."""
        self._gateway.is_stopping.set()
        await super().shutdown(sockets)


def make_server(gateway: Gateway) -> GatewayServer:
    """Return the server of a gateway."""
    options = gateway.options
    config = uvicorn.Config(
        with_guard(gateway),
        host=options.host,
        port=options.port,
        http=make_protocol(gateway),
        ws=make_socket_protocol(gateway.refusals),
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        loop="asyncio",
        lifespan="on",
        log_config=None,
        log_level="warning",  # the lines about WebSockets have the query, which may have a key
        access_log=False,
        server_header=False,
        proxy_headers=bool(options.proxies),
        forwarded_allow_ips=list(options.proxies),
        ssl_certfile=options.certificate,
        ssl_keyfile=options.certificate_key,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=ENDING_SECONDS,
        backlog=BACKLOG,
    )
    config.load()
    if config.ssl is not None:
        config.ssl.sslobject_class = make_tls_class(gateway.refusals)
    return GatewayServer(config, gateway)


async def check_start(gateway: Gateway) -> None:
    """Refuse options that would open a cluster to unauthenticated clients.

    Raises:
        UsageError: the server would be reachable from other machines without keys, or a TLS file is missing.
    """
    options = gateway.options
    if (options.certificate is None) != (options.certificate_key is None):
        raise UsageError("TLS needs a certificate and its key.", remedy="Pass --certificate and --certificate-key.")
    if not options.is_loopback and not await gateway.keys.has_any():
        raise UsageError(
            f"The server would accept connections from other machines at {options.host}, and there are no API keys.",
            remedy="Create one with `deckhands key add`, or listen at 127.0.0.1.",
        )


async def serve(gateway: Gateway, *, on_ready: Callable[[int], None]) -> None:
    """Serve until a signal.

    Args:
        on_ready: called with the port once connections are accepted.

    Raises:
        UsageError: the server cannot listen at the address; see also `check_start`.
    """
    await check_start(gateway)
    raise_file_limit()
    limit_garbage_collection()
    server = make_server(gateway)
    listening = _listen(gateway.options)
    try:
        on_ready(listening.getsockname()[1])
        await server.serve(sockets=[listening])
    finally:
        listening.close()


@contextlib.asynccontextmanager
async def serve_in_loop(gateway: Gateway) -> AsyncGenerator[int]:
    """Serve in the running event loop, without signal handlers, and yield the port."""
    await check_start(gateway)
    server = make_server(gateway)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    listening = _listen(gateway.options)
    running = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await running
        listening.close()


def _listen(options: ServerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listening = socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
        # Connections inherit it; asyncio sets it only on sockets created with an explicit protocol, which this one is
        # not.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise UsageError(
            f"The server cannot listen at {options.host} port {options.port}: {error.strerror}.",
            remedy="Choose another by --host and --port.",
        ) from error
    return listening


def limit_garbage_collection() -> None:
    """Make full garbage collections rare, and exclude everything loaded so far from them.

    With 2,000 streams, a full collection takes half a second of CPU, during which no event is delivered. By default one
    happens every 20 seconds, because each event leaves a few objects that outlive the next event.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED)


def raise_file_limit() -> None:
    """Raise the limit of open files to the maximum: each stream has two connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
