"""Finds the primary of a store that Redis Sentinel fails over.

    redis+sentinel://user:password@host1:26379,host2:26379/name/0     rediss+sentinel:// with TLS

`name` is the service that the Sentinels monitor; user, password, database and TLS options are those of its servers. The
Sentinels' own login is in the options `sentinel_username` and `sentinel_password`.

Holds: an address is used only if its server says that it is a primary. A Sentinel is trusted only for the address. A
change that a Sentinel announces is followed at once, without waiting for a call to fail.
Does not: discover further Sentinels; name three of them, on different machines.
Source: the Sentinel client specification of Redis.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import hiredis

from broker.runtime import StoreMisconfigured, StoreUnavailable, UsageError

SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
"""The scheme of such a URL, and the one of its servers' URLs."""
SENTINEL_PORT = 26379
ANSWER_SECONDS = 0.5
"""How long one Sentinel may take for an answer before the next one is asked."""
QUIET_SECONDS = 15.0
"""After this time without a message, the Sentinel that is listened to must answer a PING."""
RETRY_SECONDS = 1.0
SWITCH = b"+switch-master"
CHANNELS = ("+switch-master", "+slave", "+sdown", "-sdown", "+reboot")
"""What a Sentinel announces when the primary changes, or the replicas that it may promote."""
NEVER_PROMOTED = {b"s_down", b"o_down", b"priority-0"}
"""Flags of a replica that a Sentinel does not promote.

Nor does it promote one that is `disconnected`; but for a second after each fail-over, one that is well is so, too.
"""
OWN_OPTIONS = ("sentinel_username", "sentinel_password")
REMEDY = "Use redis+sentinel://user:password@host1:26379,host2:26379,host3:26379/name, with the name that they monitor."

Host = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Primary:
    """The primary as a Sentinel sees it.

    Attributes:
        known: how many replicas it knows.
        replicas: how many of them it may promote now or soon.
        connected: how many of these it is connected to.
    """

    host: str
    port: int
    known: int
    replicas: int
    connected: int


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """The parts of a URL.

    Attributes:
        sentinels: hosts and ports.
        service: the name of the monitored primary.
        servers: the URL of a server, with the host and port of the first Sentinel.
        login: user and password of the Sentinels, as arguments of AUTH; empty without one.
    """

    sentinels: tuple[Host, ...]
    service: str
    servers: str
    login: tuple[str, ...] = ()

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Parse a URL.

        Raises:
            ValueError: it cannot be used; the message says why.
        """
        parts = urlsplit(url)
        sentinels, netloc = parse_hosts(parts.netloc, SENTINEL_PORT)
        service, _, database = parts.path.strip("/").partition("/")
        if not sentinels:
            raise ValueError("it names no Sentinel")
        if not service:
            raise ValueError("it does not name the service that the Sentinels monitor")
        options = dict(parse_qsl(parts.query))
        names = [unquote(options.pop(name)) for name in OWN_OPTIONS if name in options]
        servers = urlunsplit((SCHEMES[parts.scheme], netloc, f"/{database or 0}", urlencode(options), ""))
        return cls(sentinels, unquote(service), servers, tuple(names))

    @property
    def shown(self) -> str:
        """The hosts and the service, without any password."""
        return f"{','.join(f'{show_host(host)}:{port}' for host, port in self.sentinels)}/{self.service}"


def is_sentinel_url(url: str) -> bool:
    """Return whether a URL names Sentinels."""
    return url.partition("://")[0].lower() in SCHEMES


async def find_primary(url: SentinelUrl, context: ssl.SSLContext | None = None, *, turn: int = 0) -> Primary:
    """Return the primary, from the first Sentinel that knows it.

    Args:
        turn: which Sentinel is asked first. Use another turn if the address did not work, because that Sentinel may
            have missed a fail-over.

    Raises:
        StoreUnavailable: no Sentinel answers, or they know no primary of this name.
        StoreMisconfigured: a Sentinel refuses the login, and no other one answers.
    """
    causes = []
    refusal = None
    turn %= len(url.sentinels)
    for sentinel in (*url.sentinels[turn:], *url.sentinels[:turn]):
        try:
            async with asyncio.timeout(ANSWER_SECONDS), _SentinelLink(sentinel, url.login, context) as link:
                found = await link.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", url.service)
                replicas = await link.call("SENTINEL", "REPLICAS", url.service) if found else []
        except StoreMisconfigured as error:
            refusal = error
        except (OSError, TimeoutError) as error:
            causes.append(f"{sentinel[0]}:{sentinel[1]}: {str(error) or type(error).__name__}")
        else:
            if found:
                up = [flags for flags in map(_read_flags, replicas) if flags.isdisjoint(NEVER_PROMOTED)]
                connected = sum(b"disconnected" not in flags for flags in up)
                return Primary(found[0].decode(), int(found[1]), len(replicas), len(up), connected)
            causes.append(f"{sentinel[0]}:{sentinel[1]} monitors no {url.service}")
    if refusal is not None:
        raise refusal
    raise StoreUnavailable(
        f"No Sentinel names a primary of {url.service} ({'; '.join(causes)}).",
        remedy="Start the Sentinels, or set DECKHANDS_URL to those that monitor it.",
    )


@dataclass(frozen=True, slots=True)
class NamedPrimary:
    """The primary that a majority of the Sentinels names.

    Attributes:
        address: its host and port.
        has_history: it has had replicas or was promoted, so the group has data.
    """

    address: Host
    has_history: bool


async def find_latest_primary(url: SentinelUrl) -> NamedPrimary:
    """Return the primary of the latest fail-over that a majority of the Sentinels knows.

    A Sentinel that has just started may name a primary that was replaced meanwhile.

    Raises:
        StoreUnavailable: no majority answers and knows a primary of this name, or a fail-over is in progress.
    """
    views, causes = await _ask_all(url, None)
    if any(view.is_failing_over for view in views):
        raise StoreUnavailable(f"A fail-over of {url.service} is in progress.", remedy="Wait for its end.")
    if len(views) <= len(url.sentinels) // 2:
        raise StoreUnavailable(
            f"{len(views)} of {len(url.sentinels)} Sentinels name a primary of {url.service} ({'; '.join(causes)}).",
            remedy="Start more of the Sentinels.",
        )
    latest = max(views, key=lambda view: (view.epoch, view.named))
    return NamedPrimary(latest.named, any(view.epoch > 0 or view.replicas > 0 for view in views))


async def check_primary(url: SentinelUrl, place: Host, context: ssl.SSLContext | None = None) -> None:
    """Check that a majority of the Sentinels names this server, and that none of them is replacing it.

    Raises:
        StoreUnavailable: it is or may be replaced.
    """
    views, _ = await _ask_all(url, context)
    if any(view.is_failing_over and view.before == place for view in views):
        raise StoreUnavailable("The store's primary is being replaced.")
    if sum(view.named == place for view in views) <= len(url.sentinels) // 2:
        raise StoreUnavailable("No majority of the Sentinels names the store's primary: it may have been replaced.")


@dataclass(frozen=True, slots=True)
class _View:
    """The primary as one Sentinel sees it.

    Attributes:
        named: the primary.
        before: the same; but while this Sentinel leads a fail-over, the primary that is being replaced.
        epoch: the number of the latest fail-over that it knows.
        replicas: how many replicas it knows.
        is_failing_over: it leads a fail-over.
    """

    named: Host
    before: Host
    epoch: int
    replicas: int
    is_failing_over: bool


async def _ask_all(url: SentinelUrl, context: ssl.SSLContext | None) -> tuple[list[_View], list[str]]:
    """Return the views of the Sentinels that answer, and the errors of the others."""
    views = []
    causes = []
    for sentinel in url.sentinels:
        try:
            async with asyncio.timeout(ANSWER_SECONDS), _SentinelLink(sentinel, url.login, context) as link:
                flat = await link.call("SENTINEL", "MASTER", url.service)
                host, port = await link.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", url.service)
        except (OSError, TimeoutError, StoreMisconfigured) as error:
            causes.append(f"{sentinel[0]}:{sentinel[1]}: {str(error) or type(error).__name__}")
            continue
        facts = dict(zip(flat[::2], flat[1::2], strict=False))
        views.append(
            _View(
                named=(host.decode(), int(port)),
                before=(facts[b"ip"].decode(), int(facts[b"port"])),
                epoch=int(facts[b"config-epoch"]),
                replicas=int(facts[b"num-slaves"]),
                is_failing_over=b"failover_in_progress" in facts[b"flags"].split(b","),
            )
        )
    return views, causes


async def order_fail_over(url: SentinelUrl, context: ssl.SSLContext | None = None) -> None:
    """Let the Sentinels replace a live primary by a replica; return once one of them has accepted the order.

    Raises:
        StoreUnavailable: no Sentinel answers.
        StoreMisconfigured: it refuses the login, or the fail-over because another one is in progress or there is no
            replica.
    """
    for sentinel in url.sentinels:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS), _SentinelLink(sentinel, url.login, context) as link:
                await link.call("SENTINEL", "FAILOVER", url.service)
                return
    raise StoreUnavailable(f"No Sentinel of {url.service} answers.", remedy="Start the Sentinels.")


async def follow_switches(
    load: Callable[[], tuple[SentinelUrl, ssl.SSLContext | None]],
    on_switch: Callable[[Host], None],
    on_change: Callable[[Primary], None],
) -> None:
    """Call functions at each change of the primary or its replicas, and after each interruption, forever.

    It listens to one Sentinel at a time, and to the next one if that connection ends.

    Args:
        load: returns the URL and the TLS context, which may have changed since the last attempt.
        on_switch: gets the address of another primary at once.
        on_change: is called with a Sentinel's view after any change.
    """
    turn = 0
    while True:
        with suppress(OSError, TimeoutError, UsageError, StoreMisconfigured, StoreUnavailable):
            url, context = load()
            sentinel = url.sentinels[turn % len(url.sentinels)]
            turn += 1
            async with _SentinelLink(sentinel, url.login, context) as link:
                async with asyncio.timeout(ANSWER_SECONDS):
                    for channel in CHANNELS:
                        await link.call("SUBSCRIBE", channel)
                    on_change(await find_primary(url, context, turn=turn - 1))
                async for address in link.changes(url.service):
                    if address is not None:
                        on_switch(address)
                    on_change(await find_primary(url, context, turn=turn - 1))
        await asyncio.sleep(RETRY_SECONDS)


class _SentinelLink:
    """A connection to one Sentinel."""

    def __init__(self, sentinel: Host, login: Sequence[str], context: ssl.SSLContext | None) -> None:
        self._sentinel = sentinel
        self._login = login
        self._context = context
        self._replies = hiredis.Reader(replyError=hiredis.ReplyError, protocolError=hiredis.ProtocolError)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        host, port = self._sentinel
        self._reader, self._writer = await asyncio.open_connection(host, port, ssl=self._context)
        try:
            if self._login:
                await self.call("AUTH", *self._login)
        except BaseException:
            self._writer.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def call(self, *command: str | bytes) -> Any:
        """Send a command and return its reply.

        Raises:
            StoreMisconfigured: the Sentinel refuses it.
            OSError: the connection is lost.
        """
        self._send(*command)
        reply = await self._receive()
        if isinstance(reply, hiredis.ReplyError):
            host, port = self._sentinel
            raise StoreMisconfigured(
                f"The Sentinel at {host}:{port} answered: {reply}",
                remedy="Check sentinel_username and sentinel_password in DECKHANDS_URL.",
            )
        return reply

    async def changes(self, service: str) -> AsyncIterator[Host | None]:
        """Yield the address of each new primary of a service, and None for each change of a server.

        Raises:
            OSError: the Sentinel no longer answers.
        """
        is_asked = False
        while True:
            try:
                async with asyncio.timeout(ANSWER_SECONDS if is_asked else QUIET_SECONDS):
                    message = await self._receive()
            except TimeoutError:
                if is_asked:
                    raise
                self._send("PING")
                is_asked = True
                continue
            is_asked = False
            if not isinstance(message, list) or message[0] != b"message":
                continue
            if message[1] != SWITCH:
                yield None
                continue
            name, _, _, host, port = message[2].decode().split()
            if name == service:
                yield host, int(port)

    def _send(self, *command: str | bytes) -> None:
        self._writer.write(hiredis.pack_command(command))  # type: ignore[arg-type]  # (its stub)

    async def _receive(self) -> Any:
        while (reply := self._replies.gets()) is False:
            chunk = await self._reader.read(1 << 14)
            if not chunk:
                raise ConnectionResetError("the Sentinel has closed the connection")
            try:
                self._replies.feed(chunk)
            except hiredis.ProtocolError as error:
                raise ConnectionResetError(str(error)) from error
        return reply


def _read_flags(replica: list[bytes]) -> set[bytes]:
    facts = dict(zip(replica[::2], replica[1::2], strict=False))
    flags = set(facts.get(b"flags", b"").split(b","))
    return flags | {b"priority-0"} if facts.get(b"slave-priority") == b"0" else flags


def parse_hosts(netloc: str, default_port: int) -> tuple[tuple[Host, ...], str]:
    """Return the hosts of a URL that names several, and the login before the first one; both are empty without a host.

    Raises:
        ValueError: one of them is not a host, with or without a port.
    """
    login, at, hosts = netloc.rpartition("@")
    found = tuple(parse_host(host, default_port) for host in hosts.split(",") if host)
    return found, f"{login}{at}{show_host(found[0][0])}:{found[0][1]}" if found else ""


def parse_host(text: str, default_port: int) -> Host:
    """Return a host and its port.

    Raises:
        ValueError: the text is not a host, with or without a port.
    """
    host, _, port = text.rpartition(":") if not text.endswith("]") and ":" in text else (text, "", "")
    host = host.strip("[]")
    if not host or not (port or "0").isdecimal():
        raise ValueError(f"{text!r} is not a host with a port")
    return host, int(port or default_port)


def show_host(host: str) -> str:
    """Return a host as a URL contains it."""
    return f"[{host}]" if ":" in host else host
