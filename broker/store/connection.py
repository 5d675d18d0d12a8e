"""One multiplexed connection to the store.

Commands of any number of coroutines are pipelined: written together and answered in order. A busy process pays for
batches, not for round trips. A blocking read (XREAD, XREADGROUP) uses a separate connection.

Holds: replies are matched to commands in the order sent. This module never resends a command, because a silent retry
would append twice. A lost reply raises `OutcomeUnknown`: the caller repeats its idempotent call. If a server reports
that it is no longer a primary, the connection and all connections made from it (`another`) resolve the name again and
reconnect. They also reconnect after a refused login, and then read URL, password and certificates again from their
files. With Sentinels, they reconnect as soon as these announce another primary.
Does not: follow redirections of Redis Cluster (`broker.store.cluster` does, with one such connection to each node),
subscribe, or decode: strings are returned as bytes.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

import hiredis

from broker.runtime import (
    Acks,
    DeckhandsError,
    OutcomeUnknown,
    StoreMisconfigured,
    StoreRefused,
    StoreUnavailable,
    UrlInFile,
    UsageError,
    load_current_url,
    make_connection_name,
    read_tls,
)
from broker.store.confirmation import ACKED_KEY, READING, Confirmations, find_demand
from broker.store.routing import CLUSTER_REMEDY, ClusterUrl, find_replicas, is_cluster_url
from broker.store.sentinel import REMEDY as SENTINEL_REMEDY
from broker.store.sentinel import (
    Host,
    Primary,
    SentinelUrl,
    check_primary,
    find_primary,
    follow_switches,
    is_sentinel_url,
    show_host,
)

Argument = bytes | str | int | float

REPLY_TIMEOUT_SECONDS = 5.0
CONNECT_TIMEOUT_SECONDS = 5.0
CONNECTS_PER_CALL = 3
"""How often one call reconnects when other calls find that the server is the wrong one."""

_DEMOTED = ("READONLY", "UNBLOCKED force unblock", "MASTERDOWN")
"""Replies of a server that is not, or no longer, a primary."""
_UNAVAILABLE = (*_DEMOTED, "UNBLOCKED", "LOADING", "MISCONF", "OOM", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "BUSY ")
_LOGIN_REFUSED = ("NOAUTH", "WRONGPASS", "ERR invalid password", "ERR AUTH")
_REFUSED = (*_LOGIN_REFUSED, "NOPERM")
NEEDED_COMMANDS = ("FUNCTION", "FCALL", "XADD", "XREADGROUP", "XAUTOCLAIM")
"""Commands that a proxy or a managed service may lack. Without one of them, no worker can use it."""
_UNSUPPORTED = re.compile(
    r"ERR\b(?!.*appendonly is disabled)"  # WAITAOF is known, and cannot be used
    r".*\b(?:unknown|unsupported|unimplemented|not (?:supported|available|allowed|implemented)|disabled)\b",
    re.IGNORECASE,
)
_NAMED = re.compile(r"(?<![\w-])[`'\"]?(FUNCTION|FCALL|INFO|WAIT|WAITAOF|X[A-Z]+)(?:\|[A-Z]+)?\b(?!-)", re.IGNORECASE)
"""Parts of the reply of a server without functions, streams or confirmations: that it refuses, and what."""
_ELSEWHERE = ("MOVED ", "ASK ", "CROSSSLOT")

WRONG_TYPE_PREFIX = "WRONGTYPE"
"""The prefix of a server's error for a key of the wrong type."""


class Connection(Protocol):
    """The interface to a store."""

    @property
    def is_cluster(self) -> bool:
        """Whether the store is a Redis Cluster: one command then reaches keys of one slot only."""
        ...

    @property
    def connects(self) -> int:
        """The number of connections made so far. A store can lose acknowledged writes only between two connections."""
        ...

    async def call(self, *command: Argument) -> Any:
        """Send one command and return its reply: int, bytes, None or nested lists of them.

        Raises:
            StoreUnavailable: nothing was executed.
            OutcomeUnknown: the command may have been executed.
            StoreError: the store refused it.
        """
        ...

    async def call_many(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Send commands back to back and return their replies in order; the first error is raised."""
        ...

    def another(self, *, reply_timeout_seconds: float) -> Connection:
        """Create a separate connection to the same store, for blocking reads."""
        ...

    async def aclose(self) -> None:
        """Close the connection; pending calls raise `OutcomeUnknown`."""
        ...


class MultiplexedConnection:
    """A `Connection` over a socket. It connects on the first call and reconnects after a loss."""

    is_cluster = False

    def __init__(
        self, store: str | Endpoint, *, reply_timeout_seconds: float = REPLY_TIMEOUT_SECONDS, acks: Acks = "local"
    ) -> None:
        self._is_first = isinstance(store, str)
        self._endpoint = Endpoint(store) if isinstance(store, str) else store
        self._reply_timeout_seconds = reply_timeout_seconds
        self.connects = 0
        self._wire: _Wire | None = None
        self._connecting: asyncio.Task[_Wire] | None = None
        self._acks = acks
        self._confirming: dict[Acks, tuple[Confirmations, MultiplexedConnection]] = {}

    async def call(self, *command: Argument) -> Any:
        """See `Connection.call`."""
        wire = await self._usable_wire()
        reply = self._check_reply(wire, await wire.send(command)[0])
        if self._acks != "local" or find_demand(command, reply) is not None:
            await self._confirm(wire.epoch, [command], [reply])
        return reply

    async def call_many(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """See `Connection.call_many`."""
        replies, epoch = await self.call_with_epoch(commands)
        await self._confirm(epoch, commands, replies)
        return replies

    def load_sentinels(self) -> tuple[SentinelUrl, ssl.SSLContext | None] | None:
        """See `Endpoint.load_sentinels`."""
        return self._endpoint.load_sentinels()

    async def _confirm(self, epoch: int, commands: Sequence[Sequence[Argument]], replies: Sequence[Any]) -> None:
        """Wait for the confirmations that the store and the conversations demand for these calls, if any."""
        demands = {find_demand(command, reply) for command, reply in zip(commands, replies, strict=True)} - {None}
        if self._acks != "local" and any(command[0] not in READING for command in commands):
            demands.add(self._acks)
        for acks in demands:
            assert acks is not None
            if acks not in self._confirming:
                connection = self.another(reply_timeout_seconds=self._reply_timeout_seconds)
                confirmations = Confirmations(
                    acks,
                    connection.call_with_epoch,
                    lambda: self._endpoint.replicas,
                    connection.count_connected_replicas,
                    check_primary=connection.check_primary,
                    find_key=lambda: self._endpoint.acked_key,
                    view=self._endpoint.view,
                    read_view=self._endpoint.read_view,
                )
                self._confirming[acks] = (confirmations, connection)
            await self._confirming[acks][0].confirm(epoch)

    async def call_with_epoch(self, commands: Sequence[Sequence[Argument]]) -> tuple[list[Any], int]:
        """Like `call_many`, without a confirmation; also return the server's epoch."""
        wire = await self._usable_wire()
        replies = wire.send(*commands)
        if replies:
            await replies[-1]  # replies arrive in order, so the others are done
        return [self._check_reply(wire, reply.result()) for reply in replies], wire.epoch

    async def exchange(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Like `call_many`, for one node of a cluster. Errors are returned in place of replies, not raised."""
        wire = await self._usable_wire()
        waiting = wire.send(*commands)
        await waiting[-1]
        replies = [reply.result() for reply in waiting]
        done = [at for at, reply in enumerate(replies) if not isinstance(reply, hiredis.ReplyError)]
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                self._leave_if_unusable(wire, reply)
        await self._confirm(wire.epoch, [commands[at] for at in done], [replies[at] for at in done])
        return replies

    async def count_connected_replicas(self) -> int:
        """Return how many replicas of this connection's server can be promoted now; at least one.

        Raises:
            StoreUnavailable: no Sentinel answers, or the server is not the primary any more.
        """
        wire, found = self._wire, await self._endpoint.find_now()
        if found is None:
            return self._endpoint.replicas
        if wire is None or wire.is_lost or wire.place != (found.host, found.port):
            raise StoreUnavailable("The store's primary was replaced.")
        return max(1, found.connected)

    async def check_primary(self) -> None:
        """Check that no replica is replacing this connection's server, unless all are connected to it.

        Raises:
            StoreUnavailable: a replica was promoted, or may have been.
        """
        wire = self._wire
        if wire is None or wire.is_lost:
            raise StoreUnavailable("The connection to the store's primary was lost.")
        await self._endpoint.check_primary(wire.place)

    def abort(self, error: Exception) -> None:
        """Close the socket.

        Pending calls raise `OutcomeUnknown`; calls that wait for a connection raise `StoreUnavailable`.
        """
        if self._connecting is not None:
            self._connecting.cancel()
        if self._wire is not None:
            self._wire.abort(error)
        for _, connection in self._confirming.values():
            connection.abort(error)

    def another(self, *, reply_timeout_seconds: float) -> MultiplexedConnection:
        """See `Connection.another`."""
        return MultiplexedConnection(self._endpoint, reply_timeout_seconds=reply_timeout_seconds)

    async def aclose(self) -> None:
        """See `Connection.aclose`."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._wire is not None:
            self._wire.abort(None)
            self._wire = None
        for _, connection in self._confirming.values():
            await connection.aclose()
        if self._is_first:
            await self._endpoint.stop_following()

    def _check_reply(self, wire: _Wire, reply: Any) -> Any:
        if not isinstance(reply, hiredis.ReplyError):
            return reply
        is_logged_out = self._leave_if_unusable(wire, reply)
        if self._endpoint.is_node and str(reply).startswith(_ELSEWHERE):
            raise StoreUnavailable("Another node of the store's cluster serves the slot now.")
        try:
            return check_reply(reply)
        except StoreMisconfigured as error:
            raise (self._endpoint.to_outage(error) if is_logged_out else error) from None

    def _leave_if_unusable(self, wire: _Wire, reply: hiredis.ReplyError) -> bool:
        """Close a connection whose server is no primary or has logged it out; return whether it was logged out."""
        is_logged_out = str(reply).startswith("NOAUTH")
        if is_logged_out or str(reply).startswith(_DEMOTED):
            self._endpoint.abandon(wire.epoch)
            wire.abort(reply)
        return is_logged_out

    async def _usable_wire(self) -> _Wire:
        wire = self._wire
        for _ in range(CONNECTS_PER_CALL):
            if wire is not None and not wire.is_lost:
                if wire.epoch == self._endpoint.epoch:
                    return wire
                wire.abort(None)
            if self._connecting is None or self._connecting.done():
                self._connecting = asyncio.ensure_future(self._open())
            wire = await self._until_open(self._connecting)
            if wire.is_lost or wire.epoch == self._endpoint.epoch:
                return wire
        raise StoreUnavailable("The store's name leads to changing servers.", remedy=PRIMARY_REMEDY)

    @staticmethod
    async def _until_open(connecting: asyncio.Task[_Wire]) -> _Wire:
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not connecting.cancelled() or (task is not None and task.cancelling()):
                raise  # the caller was cancelled
            raise StoreUnavailable("The connection to the store was given up before it was open.") from None

    async def _open(self) -> _Wire:
        loop = asyncio.get_running_loop()
        endpoint = self._endpoint
        epoch = endpoint.epoch
        address = await endpoint.find_address()
        wire = _Wire(loop, self._reply_timeout_seconds, epoch, (address.host, address.port))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                if address.path is not None:
                    await loop.create_unix_connection(lambda: wire, address.path)
                else:
                    await loop.create_connection(lambda: wire, address.host, address.port, ssl=address.ssl_context)
                *greeted, about = wire.send(*address.greetings, ("INFO", "server", "replication"))
                for reply in greeted:
                    check_reply(await reply)
                facts = await about
                address.check_role(facts)
                wire.epoch = endpoint.update_epoch(facts, epoch)
        except StoreMisconfigured as error:
            wire.abort(None)
            raise endpoint.to_outage(error) from error
        except (OSError, TimeoutError, OutcomeUnknown) as error:
            wire.abort(error)
            reason = str(error).rstrip(".") or type(error).__name__
            raise StoreUnavailable(
                f"Cannot connect to the store at {address.shown}: {reason}.", remedy=_find_remedy(error)
            ) from error
        except BaseException:
            wire.abort(None)
            raise
        self.connects += 1
        endpoint.add_wire(wire, address)
        self._wire = wire  # set here, because waiting callers may resume when the connection is already lost
        return wire


class _Wire(asyncio.Protocol):
    """One socket: a queue of packed commands to send, and a queue of futures that wait for replies."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, reply_timeout_seconds: float, epoch: int, place: tuple[str, int]
    ) -> None:
        self.epoch = epoch
        self.place = place
        self._loop = loop
        self._reply_timeout_seconds = reply_timeout_seconds
        self._reader = hiredis.Reader(replyError=hiredis.ReplyError, protocolError=hiredis.ProtocolError)
        self._out: list[bytes] = []
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None
        self.is_lost = False

    def send(self, *commands: Sequence[Argument]) -> list[asyncio.Future[Any]]:
        """Write commands back to back; each future gets its reply.

        Raises:
            StoreUnavailable: the connection is lost; nothing was written.
        """
        if self.is_lost:
            raise StoreUnavailable("The connection to the store is lost.")
        futures = [self._loop.create_future() for _ in commands]
        packed = [hiredis.pack_command(tuple(command)) for command in commands]  # type: ignore[arg-type]  # (its stub)
        if not self._waiting and self._transport is not None:
            # No other command is pending, so write at once.
            self._transport.write(packed[0] if len(packed) == 1 else b"".join(packed))
        else:
            if not self._out:
                self._loop.call_soon(self._flush)
            self._out += packed
        now = self._loop.time()
        self._waiting.extend((future, now) for future in futures)
        if self._watch is None:
            self._watch = self._loop.call_later(self._reply_timeout_seconds, self._check_replies)
        return futures

    def abort(self, error: Exception | None) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()
        waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:
            if not future.done():
                future.set_exception(
                    OutcomeUnknown(f"The connection to the store was lost before the reply ({error or 'closed'}).")
                )
                # `call_many` awaits only the last future; marks the others as retrieved, so that asyncio does not warn
                future.exception()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, chunk: bytes) -> None:
        reader = self._reader
        waiting = self._waiting
        try:
            reader.feed(chunk)
            while (reply := reader.gets()) is not False:
                future, _ = waiting.popleft()
                if not future.done():
                    future.set_result(reply)
        except (hiredis.ProtocolError, IndexError) as error:
            self.abort(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort(exc)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and not self.is_lost:
            self._transport.write(b"".join(out))

    def _check_replies(self) -> None:
        self._watch = None
        if not self._waiting:
            return
        left = self._waiting[0][1] + self._reply_timeout_seconds - self._loop.time()
        if left <= 0:
            self.abort(TimeoutError(f"no reply within {self._reply_timeout_seconds} s"))
        else:
            self._watch = self._loop.call_later(left, self._check_replies)


class Endpoint:
    """The state that the connections of one process to one store share.

    Attributes:
        epoch: increases when the server turns out not to be a primary, or the name leads to another server. Connections
            of an earlier epoch are replaced, because the earlier server may keep answering from stale data.
        has_served: whether a login has succeeded. A later refusal is then treated as temporary.
        replicas: how many replicas have to confirm a write: each that a Sentinel or a cluster may promote; else one.
        acked_key: the key written before each confirmation; in a cluster, one that the node serves.
        is_node: whether it is a node of a cluster.
        node_id: the id of the node, if another one has named it.

    Args:
        node: for the URL of a cluster, the node to connect to.
    """

    def __init__(self, url: str, node: Host | None = None) -> None:
        self.url = url
        self.acked_key = ACKED_KEY
        self.is_node = node is not None
        self.node_id: bytes | None = None
        self._node = node
        self.epoch = 0
        self.has_served = False
        self.replicas = 1
        self._lacks_replicas = False
        self._run_id = b""
        self._wires: weakref.WeakSet[_Wire] = weakref.WeakSet()
        self._follower: asyncio.Task[None] | None = None
        self._turn = 0
        self._address()

    async def find_address(self) -> _Address:
        """Return the store's current address and login, after reading the URL file and certificates again."""
        address = self._address()
        if address.sentinels is not None:
            try:
                found = await find_primary(address.sentinels, address.ssl_context, turn=self._turn)
                address.host = found.host
                address.port = found.port
                self._count_replicas(found)
                self._turn += 1  # unless it serves
            except StoreMisconfigured as error:
                raise self.to_outage(error) from error
        return address

    def _address(self) -> _Address:
        try:
            return _parse(load_current_url(self.url), self._node)
        except (StoreMisconfigured, UsageError) as error:
            raise self.to_outage(error) from error

    def load_sentinels(self) -> tuple[SentinelUrl, ssl.SSLContext | None] | None:
        """Return the Sentinels that the URL names, and how to reach them; None if it names none."""
        address = self._address()
        return None if address.sentinels is None else (address.sentinels, address.ssl_context)

    def _load_own_sentinels(self) -> tuple[SentinelUrl, ssl.SSLContext | None]:
        if (found := self.load_sentinels()) is None:
            raise StoreUnavailable("The store's URL no longer names Sentinels.")
        return found

    def add_wire(self, wire: _Wire, address: _Address) -> None:
        """Record a connection that works; with Sentinels, it ends when they announce another primary."""
        self.has_served = True
        if address.sentinels is None:
            return
        self._turn -= 1
        self._wires.add(wire)
        if self._follower is None:
            following = follow_switches(self._load_own_sentinels, self._leave_others, self._follow)
            self._follower = asyncio.get_running_loop().create_task(following)

    async def stop_following(self) -> None:
        """Stop listening to the Sentinels."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait([self._follower])

    async def find_now(self) -> Primary | None:
        """Return the primary as a Sentinel sees it now; None without Sentinels."""
        address = self._address()
        if address.sentinels is None:
            return None
        found = await find_primary(address.sentinels, address.ssl_context, turn=self._turn)
        self._count_replicas(found)
        return found

    @property
    def view(self) -> Sequence[str] | None:
        """See `Confirmations`."""
        return ("CLUSTER", "SLOTS") if self.is_node else None

    def read_view(self, ranges: Sequence[Any]) -> None:
        """See `Confirmations`."""
        assert self._node is not None
        replicas = find_replicas(ranges, self.node_id, self._node)
        if replicas is None:
            raise StoreUnavailable("The node of the store's cluster is not the primary of any slot now.")
        self.replicas = max(1, replicas)

    async def check_primary(self, place: tuple[str, int]) -> None:
        """See `MultiplexedConnection.check_primary`."""
        address = self._address()
        if address.sentinels is not None and self._lacks_replicas:
            await check_primary(address.sentinels, place, address.ssl_context)

    def _follow(self, primary: Primary) -> None:
        self._leave_others((primary.host, primary.port))
        self._count_replicas(primary)

    def _count_replicas(self, primary: Primary) -> None:
        self.replicas = max(1, primary.replicas)
        self._lacks_replicas = primary.connected < primary.known

    def _leave_others(self, primary: tuple[str, int]) -> None:
        for wire in [wire for wire in self._wires if wire.place != primary]:
            wire.abort(ConnectionResetError(f"the primary is now {primary[0]}:{primary[1]}"))

    def update_epoch(self, about: Any, epoch: int) -> int:
        """Return the epoch of a new connection. If it leads to another server than before, a new epoch starts.

        Args:
            about: the server's reply to INFO with its run id; a refusal has none.
            epoch: the epoch in which the name was resolved. If that epoch has ended since, the connection may lead to
                the previous server.
        """
        if epoch != self.epoch:
            return epoch
        found = re.search(rb"run_id:(\w+)", about) if isinstance(about, bytes) else None
        if found and found[1] != self._run_id:
            if self._run_id:
                self.epoch += 1
            self._run_id = found[1]
        return self.epoch

    def abandon(self, epoch: int) -> None:
        """Record that the server of a connection of this epoch must no longer be used."""
        if epoch == self.epoch:
            self.epoch += 1

    def to_outage(self, error: DeckhandsError) -> DeckhandsError:
        """Convert a refusal to an outage if this store has served before."""
        if not self.has_served:
            return error
        remedy = (
            f"Put the right URL into {self.url.path}; it is read at each attempt."
            if isinstance(self.url, UrlInFile)
            else "The login is retried. If the password has changed, restart this process with the new URL, or set "
            "DECKHANDS_URL_FILE."
        )
        return StoreUnavailable(error.message, remedy=remedy)


class _Address:
    """The address of a store and its connection handshake; Sentinels, if any, provide host and port.

    Reads a URL as redis-py does. An import of redis-py would take longer than a command that reads.

    Raises:
        ValueError: the URL cannot be used; the message says why.
    """

    def __init__(self, url: str, shown: str, sentinels: SentinelUrl | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError("it does not start with redis://, rediss:// or unix://")
        options: dict[str, Any] = dict(reversed(parse_qsl(parts.query)))  # of several, the first
        self.shown = shown
        self.sentinels = sentinels
        self.path = unquote(parts.path) if parts.scheme == "unix" else None
        self.host = unquote(parts.hostname or options.get("host", "localhost"))
        self.port = parts.port or int(options.get("port", 6379))
        self.ssl_context: ssl.SSLContext | None = None
        if parts.scheme == "rediss":
            if "ssl_check_hostname" in options:
                options["ssl_check_hostname"] = options["ssl_check_hostname"].upper() not in _NO
            _, self.ssl_context = read_tls(options)
        self.greetings: list[tuple[Argument, ...]] = []
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        if password := password or options.get("password", ""):
            user = user or options.get("username", "")
            self.greetings.append(("AUTH", *((user,) if user else ()), password))
        named = unquote(parts.path).replace("/", "") if self.path is None else ""
        database = options.get("db", named if named.isdecimal() else "0")
        if not database.isdecimal():
            raise ValueError(f"db={database} is not a number")
        if int(database):
            self.greetings.append(("SELECT", int(database)))
        self.greetings.append(("CLIENT", "SETNAME", make_connection_name()))

    def check_role(self, facts: Any) -> None:
        """Check that the server that the Sentinels named is a primary, by its INFO.

        Raises:
            StoreUnavailable: it is not a primary, or not yet.
        """
        if self.sentinels is not None and isinstance(facts, bytes) and b"role:master" not in facts:
            raise StoreUnavailable(f"The server at {self.host}:{self.port} is not a primary yet.")


_NO = ("0", "F", "FALSE", "N", "NO")


def _find_remedy(error: Exception) -> str:
    """Return the remedy for a connection error."""
    text = str(error)
    for sign, remedy in _REMEDIES.items():
        if sign in text:
            return remedy
    if isinstance(error, OutcomeUnknown):
        return "Start it, or set DECKHANDS_URL. If its port uses TLS, write rediss:// there."
    return "Start it, or set DECKHANDS_URL."


_REMEDIES = {
    "ostname mismatch": "Name the store in DECKHANDS_URL as its certificate does, or add ssl_check_hostname=false.",
    "IP address mismatch": "Name the store in DECKHANDS_URL as its certificate does, or add ssl_check_hostname=false.",
    "certificate has expired": "Renew the certificate of the store's server.",
    "not yet valid": "Check the clock of this machine, and the certificate of the store's server.",
    "CERTIFICATE_VERIFY_FAILED": "Add the certificate of the authority that signed it: append "
    "ssl_ca_certs=/path/to/ca.pem to DECKHANDS_URL, after `?` or `&`.",
    "WRONG_VERSION_NUMBER": "This port does not use TLS: write redis:// in DECKHANDS_URL, or use the TLS port.",
    "CERTIFICATE_REQUIRED": "The server requires a client certificate: add ssl_certfile=/path/to/cert.pem and "
    "ssl_keyfile=/path/to/key.pem to DECKHANDS_URL.",
    "UNKNOWN_CA": "The server does not trust this client's certificate: have one signed by an authority it trusts.",
}
"""Remedies by a part of the error's text; the first match counts."""
CLUSTER = "The store is a node of a Redis Cluster, and its URL does not say so."
URL_REMEDY = (
    "Use redis://host:6379/0, rediss://user:password@host:6379/0, unix:///path/to/socket or "
    "redis+sentinel://host:26379,host:26379/name. For a cluster: redis+cluster://host:6379,host:6379."
)
PRIMARY_REMEDY = (
    "Set DECKHANDS_URL to one primary, to a name or proxy that leads to it, or to Sentinels; after a failover, workers "
    "ask for the address again."
)


def _parse(url: str, node: Host | None) -> _Address:
    shown = url.rpartition("@")[2] if "@" in url else url.partition("://")[2] or url
    shown = shown.partition("?")[0]  # an option may be the password of a key
    is_sentinel, is_cluster = is_sentinel_url(url), is_cluster_url(url)
    try:
        sentinels = SentinelUrl.parse(url) if is_sentinel else None
        servers = sentinels.servers if sentinels else ClusterUrl.parse(url).servers if is_cluster else url
        address = _Address(servers, shown, sentinels)
    except ValueError as error:
        raise StoreMisconfigured(
            f"The store's URL {shown!r} cannot be used: {error}.",
            remedy=SENTINEL_REMEDY if is_sentinel else CLUSTER_REMEDY if is_cluster else URL_REMEDY,
        ) from error
    if node is not None:
        address.host, address.port = node
        address.shown = f"{show_host(node[0])}:{node[1]}"
    return address


def decode_fields(flat: Sequence[bytes]) -> dict[str, str]:
    """Decode a flat list of names and values (a hash or the fields of an entry)."""
    texts = [part.decode(errors="backslashreplace") for part in flat]
    return dict(zip(texts[::2], texts[1::2], strict=False))


def make_missing_command(name: str, answer: str) -> StoreMisconfigured:
    """Return the error about a server without a command.

    Args:
        answer: the server's own words, which complete a sentence.
    """
    needs, remedy = "functions and streams", "Use Valkey, or Redis 7.0 or newer, itself"
    if name in ("WAIT", "WAITAOF"):
        needs = f"{name} to confirm writes (DECKHANDS_ACKS)"
        remedy = f"Use {'Valkey, or Redis 7.2' if name == 'WAITAOF' else 'Valkey, or Redis 7.0'} or newer, itself"
        remedy += ", or set DECKHANDS_ACKS=local"
    return StoreMisconfigured(
        f"The store's server does not know the command {name}: it {answer}.",
        remedy=f"{remedy}. Deckhands needs {needs}, which proxies and managed services may lack.",
    )


def check_reply(reply: Any) -> Any:
    """Return a reply, or raise it if it is an error.

    Raises:
        StoreUnavailable: the server refuses commands temporarily.
        StoreMisconfigured: the server refused the login or a permission.
        StoreRefused: the server refused the command.
    """
    if not isinstance(reply, hiredis.ReplyError):
        return reply
    text = str(reply)
    if text.startswith("MISCONF") and "No space left" in text:
        raise StoreUnavailable(
            "The disk is full: the store cannot write to its append-only file (No space left on device).",
            remedy="Free some space on the store's disk, or move its directory (DECKHANDS_HOME for a private one).",
        )
    if text.startswith(_UNAVAILABLE):
        raise StoreUnavailable(f"The store temporarily refuses commands: {text}")
    if text.startswith(_ELSEWHERE):
        raise StoreMisconfigured(CLUSTER, remedy=CLUSTER_REMEDY)
    if text.startswith(_REFUSED):
        raise StoreMisconfigured(f"The store refused the login or a permission: {text}", remedy="Check DECKHANDS_URL.")
    if _UNSUPPORTED.match(text) and (found := _NAMED.search(text.partition(", with args")[0])):
        raise make_missing_command(found[1].upper(), f"answers {text!r}")
    raise StoreRefused(f"The store answered: {text}")
