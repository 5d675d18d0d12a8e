"""A primary with two replicas, and three Sentinels that fail it over: real servers on ports of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from broker.runtime import DeckhandsError, StoreRefused
from broker.store.connection import MultiplexedConnection
from tests.polling import until

PASSWORD, SENTINEL_PASSWORD = "correct-horse", "battery-staple"
SERVICE = "deck"
LIMIT_SECONDS = 60.0
DOWN_AFTER_MS = 3_000
ORDER_SECONDS = 10.0

Fault = Literal["kill", "stop", "cut", "order"]
"""What makes a primary fail over: it is killed and returns as a replica; it is stopped, or its link is cut, and it
returns as a stale primary; a Sentinel is ordered to replace it in agreement with it (Valkey 9)."""


FIRST_PORT, PORTS_PER_PROCESS, PROCESSES = 10_000, 20, 1_000
_numbers = itertools.count()


def find_port() -> int:
    """Return a port that is free and stays so: below those of outgoing connections, and of this process alone."""
    block = FIRST_PORT + os.getpid() % PROCESSES * PORTS_PER_PROCESS
    while True:
        port = block + next(_numbers) % PORTS_PER_PROCESS
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Link:
    """All connections that others make to a server. While it is cut, it passes nothing on, and says nothing."""

    def __init__(self, port: int, server_port: int) -> None:
        self.port, self._server_port = port, server_port
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        self._end_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        """Let new connections through; those that were cut end."""
        self._end_all()
        self._open.set()

    def _end_all(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _serve(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.closing(client_out), contextlib.suppress(OSError, asyncio.CancelledError):
            await self._open.wait()
            server_in, server_out = await asyncio.open_connection("127.0.0.1", self._server_port)
            with contextlib.closing(server_out):
                ways = [self._pass_on(client_in, server_out), self._pass_on(server_in, client_out)]
                running = [asyncio.ensure_future(way) for way in ways]
                try:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for one in running:
                        one.cancel()
                    await asyncio.gather(*running, return_exceptions=True)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while chunk := await source.read(65_536):
            await self._open.wait()
            target.write(chunk)
            await target.drain()


class Server:
    """A server of the group, which can be killed, paused and resumed.

    Attributes:
        port: the port that it listens on.
        link: the way to it that the others use, its own port if None.
        options: further options of the server.
        tls: the folder of its certificate, see `listen_options`; None without TLS.
    """

    def __init__(self, program: str, folder: Path, port: int, *options: str, tls: Path | None = None) -> None:
        self.program, self.folder, self.port, self.options, self.tls = program, folder, port, options, tls
        self.process: subprocess.Popen[bytes] | None = None
        self.link: Link | None = None
        self.password = PASSWORD
        folder.mkdir()

    @property
    def known_port(self) -> int:
        """The port by which the others know it."""
        return self.link.port if self.link is not None else self.port

    @property
    def url(self) -> str:
        return f"{to_scheme(self.tls)}://:{self.password}@127.0.0.1:{self.port}/0{to_query('?', self.tls)}"

    def start(self, *, primary: int | None = None) -> None:
        """Start it, as a replica of the server at a port unless that is None."""
        command = [self.program, "--bind", "127.0.0.1", "--dir", str(self.folder)]
        for name, value in listen_options(self.port, self.tls):
            command += [f"--{name}", value]
        command += ["--requirepass", self.password, "--masterauth", self.password, "--appendonly", "yes", "--save", ""]
        command += [] if self.link is None else ["--replica-announce-port", str(self.link.port)]
        command += ["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"]
        command += [] if primary is None else ["--replicaof", "127.0.0.1", str(primary)]
        command += self.options
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def call(self, *command: str | int, database: int = 0, limit_seconds: float = 2.0) -> Any:
        """Send a command over a new connection."""
        url = self.url.replace("/0", f"/{database}", 1)
        connection = MultiplexedConnection(url, reply_timeout_seconds=limit_seconds)
        try:
            return await connection.call(*command)
        finally:
            await connection.aclose()

    async def replicas(self) -> int:
        """Return how many replicas are up to date or nearly so; -1 if it is no primary or does not answer."""
        try:
            facts = await self.call("INFO", "replication")
        except DeckhandsError:
            return -1
        return facts.count(b"state=online") if b"role:master" in facts else -1


class SentinelGroup:
    """The servers and their Sentinels.

    Args:
        down_after_ms: after this time without an answer, a Sentinel regards a server as down.
        is_linked: the servers, Sentinels and clients reach each server by a `Link`.
        options: further options of the servers.
        tls: the folder of their certificate, see `listen_options`; None without TLS.
    """

    def __init__(
        self,
        program: str,
        folder: Path,
        *options: str,
        down_after_ms: int = DOWN_AFTER_MS,
        is_linked: bool = False,
        tls: Path | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.program, self.folder, self._down_after_ms, self.tls = program, folder, down_after_ms, tls
        self.servers = [
            Server(program, folder / f"server-{number}", find_port(), *options, tls=tls) for number in range(3)
        ]
        for server in self.servers if is_linked else ():
            server.link = Link(find_port(), server.port)
        self._ports = [find_port() for _ in range(3)]
        self._sentinels: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """The store's URL."""
        return self.url_of()

    def url_of(self, *, login: str = f":{PASSWORD}", service: str = SERVICE) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        options = f"?sentinel_password={SENTINEL_PASSWORD}{to_query('&', self.tls)}"
        return f"{to_scheme(self.tls)}+sentinel://{login}@{hosts}/{service}{options}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[SentinelGroup]:
        first = self.servers[0].known_port
        links = contextlib.AsyncExitStack()
        try:
            for server in self.servers:
                if server.link is not None:
                    await links.enter_async_context(server.link)
                server.start(primary=None if server.known_port == first else first)
            await self.until_replicated(self.servers[0])
            for number, port in enumerate(self._ports):
                self._start_sentinel(number, port, first)
            await self.until_agreed(self.servers[0])
            yield self
        finally:
            processes = [*self._sentinels, *(server.process for server in self.servers if server.process)]
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
            await links.aclose()

    def restart(self, old: Server, new: Server) -> None:
        """Start a primary that was killed, as a replica of the new one."""
        old.start(primary=new.known_port)

    def end_sentinel(self) -> None:
        """Kill the first Sentinel; two are left, which suffice for a fail-over."""
        self._sentinels[0].kill()
        self._sentinels[0].wait()

    async def until_promoted(self, *, other_than: Server) -> Server:
        """Wait until another server is the primary, and return it."""

        others = [server for server in self.servers if server is not other_than]

        async def promoted() -> Server | None:
            found = await asyncio.gather(*(server.replicas() for server in others))
            return next((server for server, count in zip(others, found, strict=True) if count >= 0), None)

        return await self._until_value(promoted, "promotion")

    async def primary(self) -> Server:
        """Return the only primary, once there is one."""

        async def only() -> Server | None:
            found = await self.find_primaries()
            return found[0] if len(found) == 1 else None

        return await self._until_value(only, "only primary")

    async def until_replicated(self, server: Server, *, count: int = 2) -> None:
        async def has_replicas() -> bool:
            return await server.replicas() >= count

        await until(has_replicas, limit=LIMIT_SECONDS, what=f"{count} replicas")

    async def find_primaries(self) -> list[Server]:
        """Return the servers that call themselves primaries."""
        counts = await asyncio.gather(*(server.replicas() for server in self.servers))
        return [server for server, count in zip(self.servers, counts, strict=True) if count >= 0]

    async def _until_value(self, find: Callable[[], Awaitable[Server | None]], what: str) -> Server:
        found: list[Server] = []

        async def look() -> bool:
            if (value := await find()) is not None:
                found.append(value)
            return bool(found)

        await until(look, limit=LIMIT_SECONDS, what=what)
        return found[0]

    async def until_agreed(self, primary: Server) -> None:
        """Wait until all Sentinels know each other, the primary, and two replicas that follow it.

        Without that, they have nothing to promote when this primary dies.
        """

        await until(lambda: self._agree(primary), limit=LIMIT_SECONDS, what="Sentinels that agree")

    async def _agree(self, primary: Server) -> bool:
        try:
            return all([await self._knows(port, primary.known_port) for port in self._ports])
        except DeckhandsError:
            return False

    async def until_whole(self) -> Server:
        """Wait until all Sentinels agree on one primary with two replicas, and return it.

        On a busy machine, the Sentinels may have replaced the one that was promoted first.
        """
        found: list[Server] = []

        async def is_whole() -> bool:
            primaries = await self.find_primaries()
            found[:] = primaries
            return len(primaries) == 1 and await primaries[0].replicas() == 2 and await self._agree(primaries[0])

        await until(is_whole, limit=LIMIT_SECONDS, what="group that is whole")
        return found[0]

    async def spare(self, server: Server) -> None:
        """Let the Sentinels never promote a replica."""
        await server.call("CONFIG", "SET", "replica-priority", 0)

        async def is_spared() -> bool:
            listed = [await self.call_sentinel(port, "SENTINEL", "REPLICAS", SERVICE) for port in self._ports]
            facts = [to_facts(flat) for replicas in listed for flat in replicas]
            return sum(each[b"slave-priority"] == b"0" for each in facts) == len(self._ports)

        await until(is_spared, limit=LIMIT_SECONDS, what="replica that is spared")

    async def order(self, old: Server, *, is_coordinated: bool = True) -> Server:
        """Order a Sentinel to replace the primary; return the new one.

        A Sentinel may give the order up; then it is given again.

        Args:
            is_coordinated: the primary lets the replica catch up first.
        """
        options = ("COORDINATED",) if is_coordinated else ()
        while True:
            with contextlib.suppress(StoreRefused):
                await self.call_sentinel(self._ports[-1], "SENTINEL", "FAILOVER", SERVICE, *options)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ORDER_SECONDS):
                    return await self.until_promoted(other_than=old)

    async def call_sentinel(self, port: int, *command: str | int) -> Any:
        connection = self._open_sentinel(port)
        try:
            return await connection.call(*command)
        finally:
            await connection.aclose()

    async def call_sentinels(self, *command: str | int) -> None:
        for port in self._ports:
            await self.call_sentinel(port, *command)

    def _open_sentinel(self, port: int) -> MultiplexedConnection:
        query = to_query("?", self.tls)
        return MultiplexedConnection(f"{to_scheme(self.tls)}://:{SENTINEL_PASSWORD}@127.0.0.1:{port}/0{query}")

    async def _knows(self, port: int, primary: int) -> bool:
        connection = self._open_sentinel(port)
        try:
            await connection.call("SENTINEL", "DEBUG", "INFO-PERIOD", 500)  # how often it looks at the servers
            master, replicas = await connection.call_many(
                [("SENTINEL", "MASTER", SERVICE), ("SENTINEL", "REPLICAS", SERVICE)]
            )
        finally:
            await connection.aclose()
        facts = to_facts(master)
        following = [to_facts(flat) for flat in replicas]
        return (facts[b"port"], facts[b"num-other-sentinels"], facts[b"flags"], len(following)) == (
            str(primary).encode(),
            b"2",
            b"master",
            2,
        ) and all(
            (found[b"flags"], found[b"master-link-status"], found[b"master-port"])
            == (b"slave", b"ok", str(primary).encode())
            for found in following
        )

    def _start_sentinel(self, number: int, port: int, first: int) -> None:
        folder = self.folder / f"sentinel-{number}"
        folder.mkdir()
        settings = folder / "sentinel.conf"
        settings.write_text(
            "".join(f"{name} {value}\n" for name, value in listen_options(port, self.tls))
            + f"bind 127.0.0.1\ndir {folder}\nrequirepass {SENTINEL_PASSWORD}\n"
            f"sentinel sentinel-pass {SENTINEL_PASSWORD}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {first} 2\nsentinel auth-pass {SERVICE} {PASSWORD}\n"
            f"sentinel down-after-milliseconds {SERVICE} {self._down_after_ms}\n"
            f"sentinel failover-timeout {SERVICE} {2 * self._down_after_ms}\n"
            f"sentinel parallel-syncs {SERVICE} 2\n"
        )
        with (folder / "log").open("ab") as log:
            command = [self.program, str(settings), "--sentinel"]
            self._sentinels.append(subprocess.Popen(command, stdout=log, stderr=log))


def listen_options(port: int, tls: Path | None) -> list[tuple[str, str]]:
    """Return the options by which a server listens; with TLS, by `cert.pem` and `key.pem` of a folder.

    It trusts the certificates in `ca.pem`.
    """
    if tls is None:
        return [("port", str(port))]
    files = {"cert": "cert.pem", "key": "key.pem", "ca-cert": "ca.pem"}
    options = [("port", "0"), ("tls-port", str(port)), ("tls-replication", "yes"), ("tls-auth-clients", "no")]
    return [*options, *((f"tls-{name}-file", str(tls / file)) for name, file in files.items())]


def to_scheme(tls: Path | None) -> str:
    return "redis" if tls is None else "rediss"


def to_query(sign: str, tls: Path | None) -> str:
    return "" if tls is None else f"{sign}ssl_ca_certs={tls}/ca.pem"


def to_facts(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def fail_over(group: Group, fault: Fault = "kill") -> tuple[Server, Server]:
    """Let the primary fail over by a fault, and wait until the group is whole again; return it and the new primary."""
    old = await group.primary()
    new = await begin_fail_over(group, old, fault)
    return old, await end_fail_over(group, old, new, fault)


class Group(Protocol):
    """Servers of which one is the primary."""

    @property
    def url(self) -> str: ...

    async def primary(self) -> Server: ...

    async def find_primaries(self) -> list[Server]: ...

    async def order(self, old: Server) -> Server: ...

    async def until_promoted(self, *, other_than: Server) -> Server: ...

    def restart(self, old: Server, new: Server) -> None: ...

    async def until_whole(self) -> Server: ...


async def begin_fail_over(group: Group, old: Server, fault: Fault) -> Server:
    """Do a fault to the primary, and return the new one as soon as it is promoted."""
    if fault == "kill":
        old.kill()
    elif fault == "stop":
        old.send(signal.SIGSTOP)
    elif fault == "cut":
        assert old.link is not None
        old.link.cut()
    else:
        return await group.order(old)
    return await group.until_promoted(other_than=old)


async def end_fail_over(group: Group, old: Server, new: Server, fault: Fault) -> Server:
    """Let the old primary return, wait until the group is whole again, and return its primary."""
    if fault == "kill":
        group.restart(old, new)
    elif fault == "stop":
        old.send(signal.SIGCONT)
    elif fault == "cut":
        assert old.link is not None
        old.link.mend()
    return await group.until_whole()
