"""A primary with two replicas, and three Sentinels that fail it over: real servers on ports of this machine."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from broker.runtime import DeckhandsError
from broker.store.connection import MultiplexedConnection
from tests.faults.server_process import free_port
from tests.polling import until

PASSWORD, SENTINEL_PASSWORD = "correct-horse", "battery-staple"
SERVICE = "deck"
LIMIT_SECONDS = 60.0


class Server:
    """A server of the group, which can be killed, paused and resumed."""

    def __init__(self, program: str, folder: Path, port: int, options: Sequence[str] = ()) -> None:
        self.program, self.folder, self.port, self.options = program, folder, port, options
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir()

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def start(self, *, primary: int | None = None) -> None:
        """Start it, as a replica of the server at a port unless that is None."""
        command = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--requirepass", PASSWORD, "--masterauth", PASSWORD, "--appendonly", "yes", "--save", ""]
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

    async def call(self, *command: str | int, database: int = 0) -> Any:
        """Send a command over a new connection."""
        connection = MultiplexedConnection(self.url.removesuffix("0") + str(database), reply_timeout_seconds=2.0)
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
    """The servers and their Sentinels."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.servers = [Server(program, folder / f"server-{number}", free_port()) for number in range(3)]
        self._ports = [free_port() for _ in range(3)]
        self._sentinels: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """The store's URL."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        return f"redis+sentinel://:{PASSWORD}@{hosts}/{SERVICE}?sentinel_password={SENTINEL_PASSWORD}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[SentinelGroup]:
        first = self.servers[0].port
        try:
            for server in self.servers:
                server.start(primary=None if server.port == first else first)
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

    def end_sentinel(self) -> None:
        """Kill the first Sentinel; two are left, which suffice for a fail-over."""
        self._sentinels[0].kill()
        self._sentinels[0].wait()

    async def until_promoted(self, *, other_than: Server) -> Server:
        """Wait until another server is the primary, and return it."""

        async def promoted() -> Server | None:
            found = await self._find_primaries()
            return next((server for server in found if server is not other_than), None)

        return await self._until_value(promoted, "promotion")

    async def primary(self) -> Server:
        """Return the only primary, once there is one."""

        async def only() -> Server | None:
            found = await self._find_primaries()
            return found[0] if len(found) == 1 else None

        return await self._until_value(only, "only primary")

    async def until_replicated(self, server: Server, *, count: int = 2) -> None:
        async def has_replicas() -> bool:
            return await server.replicas() >= count

        await until(has_replicas, limit=LIMIT_SECONDS, what=f"{count} replicas")

    async def _find_primaries(self) -> list[Server]:
        return [server for server in self.servers if await server.replicas() >= 0]

    async def _until_value(self, find: Any, what: str) -> Server:
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

        async def agree() -> bool:
            try:
                return all([await self._knows(port, primary.port) for port in self._ports])
            except DeckhandsError:
                return False

        await until(agree, limit=LIMIT_SECONDS, what="Sentinels that agree")

    async def _knows(self, port: int, primary: int) -> bool:
        connection = MultiplexedConnection(f"redis://:{SENTINEL_PASSWORD}@127.0.0.1:{port}/0")
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
            f"port {port}\nbind 127.0.0.1\ndir {folder}\nrequirepass {SENTINEL_PASSWORD}\n"
            f"sentinel sentinel-pass {SENTINEL_PASSWORD}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {first} 2\nsentinel auth-pass {SERVICE} {PASSWORD}\n"
            f"sentinel down-after-milliseconds {SERVICE} 3000\nsentinel failover-timeout {SERVICE} 6000\n"
            f"sentinel parallel-syncs {SERVICE} 2\n"
        )
        with (folder / "log").open("ab") as log:
            command = [self.program, str(settings), "--sentinel"]
            self._sentinels.append(subprocess.Popen(command, stdout=log, stderr=log))


def to_facts(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def fail_over(group: SentinelGroup) -> tuple[Server, Server]:
    """Kill the primary, wait for the promotion, and start it again as a replica; return it and the new primary."""
    old = await group.primary()
    old.kill()
    new = await group.until_promoted(other_than=old)
    old.start(primary=new.port)
    await group.until_replicated(new)
    await group.until_agreed(new)
    return old, new
