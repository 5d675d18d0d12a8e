"""An HTTP proxy that lets a workspace reach the hosts on its list and nothing else.

Holds:
    - A name is looked up once, by the proxy, which connects to the exact address that it checked.
    - One request per connection. `h11` parses requests and answers and writes them again, so the other side cannot
      find a second request inside one. Encrypted traffic is forwarded unchanged.
    - Connections, their silence and their bytes are limited. If there are too many, the oldest connection without a
      request ends first, or else the longest idle one.
Does not: inspect encrypted connections. A listed host that serves other sites' content gives access to that, too.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import h11

from broker.contract import HostRule, parse_authority, render_authority
from broker.runtime import AddressRules

HEAD_LIMIT_BYTES = 32 * 1024
HEAD_LIMIT_SECONDS = 30.0
CONNECT_LIMIT_SECONDS = 15.0
PIECE_BYTES = 64 * 1024
CLOSE_LIMIT_SECONDS = 5.0

# Headers about the connection, not the request. A proxy forwards none of them (RFC 9110, 7.6.1).
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"upgrade", b"http2-settings"}
)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Report = Callable[[str, str], None]
"""Called with the target and the reason of a refusal."""


@dataclass(frozen=True, slots=True)
class EgressRules:
    """The permissions of one workspace.

    Attributes:
        hosts: the allowed hosts. A name must be listed, and all its addresses in use must be in `addresses`.
        connections: maximum number of open connections with a request.
        waiting: maximum number of open connections without a request.
        idle_seconds: a connection that is silent for this long is ended if there are too many.
        limit_bytes: total of both directions during the life of the host.
        silence_seconds: a connection silent for this long ends.
    """

    hosts: tuple[HostRule, ...]
    addresses: AddressRules = field(default_factory=AddressRules)
    connections: int = 64
    waiting: int = 64
    idle_seconds: float = 30.0
    limit_bytes: int = 20 * 2**30
    silence_seconds: float = 600.0


class EgressRequestRefused(Exception):
    """A refused request. The model that made it reads `why`."""

    def __init__(self, status: int, target: str, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.target = target
        self.why = why


class EgressProxy:
    """The proxy of one workspace.

    Args:
        report: Called with every refusal.
        resolve: Looks up a name; the machine's own resolver by default.
    """

    def __init__(self, rules: EgressRules, report: Report, resolve: Resolve | None = None) -> None:
        self._rules = rules
        self._report = report
        self._resolve = resolve or _look_up
        self._open = 0
        self._waiting: dict[asyncio.StreamWriter, None] = {}
        self._passages: set[_Tunnel] = set()
        self._bytes = 0

    async def serve(self, listener: socket.socket) -> asyncio.Server:
        """Start serving a listening socket of any network namespace."""
        return await asyncio.start_server(self._serve_connection, sock=listener, limit=PIECE_BYTES)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. No error on it ends the proxy."""
        client = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_LIMIT_BYTES)
        try:
            await self._serve(_Peer(client, reader, writer))
        except EgressRequestRefused as refused:
            self._report(refused.target, refused.why)
            with suppress(OSError, h11.ProtocolError, TimeoutError):
                await _answer(_Peer(client, reader, writer), refused.status, refused.why)
        except (OSError, h11.ProtocolError, TimeoutError, asyncio.IncompleteReadError):
            pass  # one side has closed the connection
        finally:
            await _close(writer)

    async def _serve(self, client: _Peer) -> None:
        request = await self._read_request(client)
        if request is None:
            return
        if self._open >= self._rules.connections and not self._end_most_silent():
            text = f"{self._rules.connections} connections are open, which is as many as this workspace may have."
            raise EgressRequestRefused(429, "?", text)
        self._open += 1
        try:
            if request.method == b"CONNECT":
                host, port = _parse_target(request.target.decode("ascii"), None)
                with self._passage(client, await self._connect(host, port)) as passage:
                    await self._tunnel(client, passage)
            else:
                host, port, path = _parse_absolute(request.target.decode("ascii"))
                _check_framing(request, render_authority(host, port))
                with self._passage(client, await self._connect(host, port)) as passage:
                    await self._forward(client, request, path, passage)
        finally:
            self._open -= 1

    async def _read_request(self, client: _Peer) -> h11.Request | None:
        """Wait for the request of a connection; None if the connection ends first."""
        if len(self._waiting) >= self._rules.waiting:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.transport.abort()
        self._waiting[client.writer] = None
        try:
            async with asyncio.timeout(HEAD_LIMIT_SECONDS):
                request = await client.next()
        except h11.RemoteProtocolError as error:
            if client.writer not in self._waiting:
                return None  # the connection had to make room
            raise EgressRequestRefused(
                error.error_status_hint, "?", f"This is not a request that the proxy takes: {error}."
            ) from error
        finally:
            self._waiting.pop(client.writer, None)
        return request if isinstance(request, h11.Request) else None

    def _end_most_silent(self) -> bool:
        """End the longest idle connection, if it is idle for long enough. Return whether one was ended."""
        passage = min(self._passages, key=lambda passage: passage.heard, default=None)
        now = asyncio.get_running_loop().time()
        if passage is None or now - passage.heard < self._rules.idle_seconds:
            return False
        self._passages.discard(passage)
        for writer in (passage.client.writer, passage.origin.writer):
            writer.transport.abort()
        return True

    @contextmanager
    def _passage(self, client: _Peer, origin: _Origin) -> Iterator[_Tunnel]:
        passage = _Tunnel(client, origin, asyncio.get_running_loop().time())
        self._passages.add(passage)
        try:
            yield passage
        finally:
            self._passages.discard(passage)

    async def _connect(self, host: str, port: int) -> _Origin:
        """Connect to an allowed host."""
        target = render_authority(host, port)
        if not any(rule.allows(host, port) for rule in self._rules.hosts):
            raise EgressRequestRefused(
                403, target, f"{target} is not among the hosts that this workspace may reach (its `allow`)."
            )
        self._check_bytes(target)
        try:
            async with asyncio.timeout(CONNECT_LIMIT_SECONDS):
                found = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise EgressRequestRefused(502, target, f"{host} cannot be looked up: {error}.") from error
        addresses = [address for address in found if self._rules.addresses.may_reach(address)]
        if not addresses:
            why = f"{target} leads to an address that is not of the public internet (DECKHANDS_EGRESS_PRIVATE)."
            raise EgressRequestRefused(403, target, why)
        failure: Exception | None = None
        for address in addresses:
            try:
                async with asyncio.timeout(CONNECT_LIMIT_SECONDS):
                    # Connect to the checked address; a number is not looked up again.
                    reader, writer = await asyncio.open_connection(address, port, limit=PIECE_BYTES)
            except OSError as error:
                failure = error
            else:
                return _Origin(target, reader, writer)
        raise EgressRequestRefused(502, target, f"{target} cannot be connected to: {failure or 'it does not answer'}.")

    async def _tunnel(self, client: _Peer, passage: _Tunnel) -> None:
        origin = passage.origin
        try:
            await client.send(h11.Response(status_code=200, reason=b"Connection established", headers=[]))
            early, _ = client.state.trailing_data
            if early:
                await self._pass_on(early, origin.writer, passage)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._copy(client.reader, origin.writer, passage))
                both.create_task(self._copy(origin.reader, client.writer, passage))
        except* (OSError, EgressRequestRefused, TimeoutError) as errors:
            self._note_refusals(errors)
        finally:
            await _close(origin.writer)

    async def _forward(self, client: _Peer, request: h11.Request, path: str, passage: _Tunnel) -> None:
        origin = passage.origin
        server = _Peer(h11.Connection(h11.CLIENT), origin.reader, origin.writer)
        try:
            headers = [
                (b"Host", _host_line(origin.target)),
                *_select_forwarded(request.headers),
                (b"Connection", b"close"),
            ]
            await server.send(h11.Request(method=request.method, target=path, headers=headers))
            sending = asyncio.create_task(self._copy_events(client, server, passage))
            try:
                await self._answer_with(server, client, passage)
            finally:
                sending.cancel()
                with suppress(asyncio.CancelledError, OSError, h11.ProtocolError, TimeoutError, EgressRequestRefused):
                    await sending
        finally:
            await _close(origin.writer)

    async def _answer_with(self, server: _Peer, client: _Peer, passage: _Tunnel) -> None:
        while True:
            async with asyncio.timeout(self._rules.silence_seconds):
                event = await server.next()
            if isinstance(event, h11.InformationalResponse):
                await client.send(event)
            elif isinstance(event, h11.Response):
                break
            else:
                target = passage.origin.target
                raise EgressRequestRefused(502, target, f"{target} ended the connection without an answer.")
        headers = [*_select_forwarded(event.headers), (b"Connection", b"close")]
        await client.send(h11.Response(status_code=event.status_code, reason=event.reason, headers=headers))
        await self._copy_events(server, client, passage)

    async def _copy_events(self, source: _Peer, sink: _Peer, passage: _Tunnel) -> None:
        """Forward the body of a message to its end."""
        while True:
            async with asyncio.timeout(self._rules.silence_seconds):
                event = await source.next()
                if isinstance(event, h11.Data):
                    self._count(len(event.data), passage)
                    await sink.send(h11.Data(data=bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage):
                    await sink.send(event)
                    return
                else:
                    return

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passage: _Tunnel) -> None:
        """Forward bytes until the sender closes."""
        async with asyncio.timeout(self._rules.silence_seconds) as silence:
            while piece := await reader.read(PIECE_BYTES):
                silence.reschedule(asyncio.get_running_loop().time() + self._rules.silence_seconds)
                await self._pass_on(piece, writer, passage)
            if writer.can_write_eof():
                writer.write_eof()

    async def _pass_on(self, piece: bytes, writer: asyncio.StreamWriter, passage: _Tunnel) -> None:
        self._count(len(piece), passage)
        writer.write(piece)
        await writer.drain()

    def _count(self, size: int, passage: _Tunnel) -> None:
        passage.heard = asyncio.get_running_loop().time()
        self._bytes += size
        self._check_bytes(passage.origin.target)

    def _check_bytes(self, target: str) -> None:
        if self._bytes > self._rules.limit_bytes:
            limit = self._rules.limit_bytes
            raise EgressRequestRefused(
                403, target, f"This workspace has moved {limit} bytes, all it may (DECKHANDS_EGRESS_BYTES)."
            )

    def _note_refusals(self, errors: BaseExceptionGroup[BaseException]) -> None:
        for error in errors.exceptions:
            if isinstance(error, BaseExceptionGroup):
                self._note_refusals(error)
            elif isinstance(error, EgressRequestRefused):
                self._report(error.target, error.why)


@dataclass(frozen=True, slots=True)
class _Origin:
    target: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(slots=True, eq=False)
class _Tunnel:
    """A client, its origin server, and the time of the latest data from either."""

    client: _Peer
    origin: _Origin
    heard: float


@dataclass(frozen=True, slots=True)
class _Peer:
    """One of the two HTTP peers of the proxy."""

    state: h11.Connection
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def next(self) -> object:
        """Return the next event."""
        while (event := self.state.next_event()) is h11.NEED_DATA:
            self.state.receive_data(await self.reader.read(PIECE_BYTES))
        return event

    async def send(self, event: h11.Event) -> None:
        """Send an event."""
        if piece := self.state.send(event):
            self.writer.write(piece)
            await self.writer.drain()


async def _look_up(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def _parse_target(text: str, default_port: int | None) -> tuple[str, int]:
    try:
        return parse_authority(text, default_port)
    except ValueError as error:
        raise EgressRequestRefused(
            400, text, f"The proxy takes HOST:PORT, a name or a plain address: {error}."
        ) from error


def _parse_absolute(text: str) -> tuple[str, int, str]:
    """Return host, port and path of `http://host:port/path`."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.lower() != "http":
        raise EgressRequestRefused(
            400, text, "This is a proxy: it takes http://HOST/PATH, and CONNECT HOST:PORT for all else."
        )
    end = min((at for at in map(rest.find, "/?#") if at >= 0), default=len(rest))
    host, port = _parse_target(rest[:end], 80)
    path = rest[end:].partition("#")[0]
    return host, port, path if path.startswith("/") else f"/{path}"


def _check_framing(request: h11.Request, target: str) -> None:
    """Refuse a request whose end is ambiguous between two parsers."""
    names = [name for name, _ in request.headers]
    if b"content-length" in names and b"transfer-encoding" in names:
        raise EgressRequestRefused(400, target, "A request has either a Content-Length or a Transfer-Encoding.")


def _select_forwarded(headers: h11._headers.Headers) -> list[tuple[bytes, bytes]]:
    named = {option.strip().lower() for name, value in headers if name == b"connection" for option in value.split(b",")}
    left_out = HOP_BY_HOP | {b"host"} | (named - {b"content-length", b"transfer-encoding"})
    return [(name, value) for name, value in headers if name not in left_out]


def _host_line(target: str) -> bytes:
    return target.removesuffix(":80").encode("ascii")


async def _answer(client: _Peer, status: int, why: str) -> None:
    """Answer a refused request. The status line contains the reason, because most programs show only that line."""
    if client.state.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    reason = why.encode("ascii", "replace")
    body = reason + b"\n"
    headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(body))), ("Connection", "close")]
    async with asyncio.timeout(CLOSE_LIMIT_SECONDS):
        await client.send(h11.Response(status_code=status, reason=reason, headers=headers))
        await client.send(h11.Data(data=body))
        await client.send(h11.EndOfMessage())


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(CLOSE_LIMIT_SECONDS):
            await writer.wait_closed()
    writer.transport.abort()
