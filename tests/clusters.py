"""A Redis Cluster of three primaries with a replica each: real servers on ports of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from broker.runtime import DeckhandsError, StoreRefused
from broker.store.routing import SLOTS
from tests.polling import unhurried, until
from tests.sentinels import ORDER_SECONDS, PASSWORD, Server, to_query, to_scheme

PRIMARIES = 3
NODE_TIMEOUT_MS = 2_000
LIMIT_SECONDS = 60.0
MOVED_AT_ONCE = 10


def lasting_port() -> int:
    """Return a free port that is not given to outgoing connections of other processes, before its server uses it."""
    while True:
        port = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Cluster:
    """The nodes of a cluster. Nodes 0 to 2 are the first primaries, 3 to 5 their replicas.

    Args:
        replicas: of each primary.
        tls: the folder of their certificate, see `listen_options`; None without TLS.
    """

    def __init__(
        self,
        program: str,
        folder: Path,
        *,
        primaries: int = PRIMARIES,
        replicas: int = 1,
        node_timeout_ms: int = NODE_TIMEOUT_MS,
        tls: Path | None = None,
    ) -> None:
        self.program, self.folder, self._node_timeout_ms, self.tls = program, folder, node_timeout_ms, tls
        self.nodes = [self._make_node(number) for number in range(primaries * (1 + replicas))]
        self._primaries, self._replicas = primaries, replicas

    @property
    def url(self) -> str:
        """The store's URL; it names two of the nodes."""
        return self.url_of()

    def url_of(self, login: str = f":{PASSWORD}") -> str:
        """Return the store's URL for a user."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])
        return f"{to_scheme(self.tls)}+cluster://{login}@{hosts}{to_query('?', self.tls)}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Cluster]:
        try:
            for node in self.nodes:
                node.start()
            await self._form()
            yield self
        finally:
            processes = [node.process for node in self.nodes if node.process]
            for process in processes:
                process.send_signal(signal.SIGCONT)
                process.kill()
            for process in processes:
                process.wait()

    async def add_node(self) -> Server:
        """Add a primary without slots, functions and replicas."""
        node = self._make_node(len(self.nodes))
        self.nodes.append(node)
        node.start()
        await self._until_answers(node)
        await self.nodes[0].call("CLUSTER", "MEET", "127.0.0.1", node.port, *self._bus_port(node))
        await self._until_known()

        async def serves() -> bool:
            return b"cluster_state:ok" in await node.call("CLUSTER", "INFO")

        await until(serves, limit=LIMIT_SECONDS, what="new node that serves")
        return node

    async def add_replica(self, primary: Server) -> Server:
        """Add a replica of a primary, and wait until the primary knows it and has sent it everything."""
        node = await self.add_node()
        await self._order(node, "CLUSTER", "REPLICATE", await self._id(primary))

        async def is_known() -> bool:
            ranges = await primary.call("CLUSTER", "SLOTS")
            known = {
                int(replica[1]) for _, _, at, *others in ranges if int(at[1]) == primary.port for replica in others
            }
            return node.port in known and await primary.replicas() == len(known)

        await until(is_known, limit=LIMIT_SECONDS, what="replica")
        return node

    async def remove_node(self, node: Server) -> None:
        """Take a primary that has no slots out of the cluster, and end it."""
        gone = await self._id(node)
        self.nodes.remove(node)
        for other in self.nodes:
            await self._order(other, "CLUSTER", "FORGET", gone)
        node.kill()

    async def find_node(self, slot: int) -> Server:
        """Return the primary that serves a slot, as the first node that answers knows it."""
        for node in self.nodes:
            try:
                ranges = await node.call("CLUSTER", "SLOTS")
            except DeckhandsError:
                continue
            port = next(int(at[1]) for first, last, at, *_ in ranges if first <= slot <= last)
            return next(node for node in self.nodes if node.port == port)
        raise AssertionError("no node answers")

    async def move_slot(self, slot: int, target: Server) -> None:
        """Move a slot to another primary, key by key, as redis-cli does."""
        source = await self._find_owner(slot)
        if source is target:
            return
        await self.start_move(slot, source, target)
        while keys := await self._order(source, "CLUSTER", "GETKEYSINSLOT", slot, MOVED_AT_ONCE):
            await self._order(
                source,
                *("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "AUTH", PASSWORD, "KEYS"),
                *(key.decode() for key in keys),
            )
        await self.end_move(slot, source, target)

    async def _find_owner(self, slot: int) -> Server:
        """Return the node that says of itself that it serves a slot; others may not know of its last move yet."""
        for node in self.nodes:
            if await self.find_replicas(node, slot) is not None:
                return node
        raise AssertionError("no node serves the slot")

    async def start_move(self, slot: int, source: Server, target: Server) -> None:
        """Let both nodes know that a slot is being moved."""
        await self._order(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", await self._id(source))
        await self._order(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", await self._id(target))

    async def end_move(self, slot: int, source: Server, target: Server) -> None:
        """Give a slot to the node that has its keys."""
        node_id = await self._id(target)
        for node in (target, source):
            await self._order(node, "CLUSTER", "SETSLOT", slot, "NODE", node_id)

    async def until_promoted(self, slot: int, *, other_than: Server) -> Server:
        """Wait until all live nodes agree that another node serves a slot, and return it."""
        found: list[Server] = []

        async def is_promoted() -> bool:
            nodes = set()
            for node in self.nodes:
                if node is other_than or node.process is None or node.process.poll() is not None:
                    continue
                try:
                    ranges = await node.call("CLUSTER", "SLOTS")
                    if b"cluster_state:ok" not in await node.call("CLUSTER", "INFO"):
                        return False
                except DeckhandsError:
                    return False
                nodes |= {int(at[1]) for first, last, at, *_ in ranges if first <= slot <= last}
            if len(nodes) != 1 or other_than.port in nodes:
                return False
            found.append(next(node for node in self.nodes if node.port in nodes))
            return True

        await until(is_promoted, limit=LIMIT_SECONDS, what="promotion")
        return found[0]

    async def is_served(self, slot: int, *, other_than: Server) -> bool:
        """Return whether another node says of itself that it serves a slot."""
        for node in self.nodes:
            if node is not other_than and await self.find_replicas(node, slot) is not None:
                return True
        return False

    async def find_replicas(self, primary: Server, slot: int) -> list[Server] | None:
        """Return the replicas of a slot that have not failed, as its primary knows them; None if it is not the primary."""
        with contextlib.suppress(DeckhandsError):  # it is dead
            for first, last, at, *others in await self._order(primary, "CLUSTER", "SLOTS"):
                if first <= slot <= last and int(at[1]) == primary.port:
                    ports = {int(other[1]) for other in others}
                    return [node for node in self.nodes if node.port in ports]
        return None

    def _make_node(self, number: int) -> Server:
        options = self._make_options()
        return Server(self.program, self.folder / f"node-{number}", lasting_port(), *options, tls=self.tls)

    def _make_options(self) -> tuple[str, ...]:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(self._node_timeout_ms))
        options += ("--cluster-port", str(lasting_port()), "--cluster-replica-validity-factor", "0")
        options += ("--cluster-allow-replica-migration", "no")
        return options + (("--tls-cluster", "yes") if self.tls is not None else ())

    async def _form(self) -> None:
        size = -(-SLOTS // self._primaries)
        for number, node in enumerate(self.nodes):
            await self._until_answers(node)
            with contextlib.suppress(StoreRefused):  # it has one already, as after an order whose reply was late
                await node.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number < self._primaries:
                last = min((number + 1) * size, SLOTS) - 1
                has = {slot for low, high, *_ in await node.call("CLUSTER", "SLOTS") for slot in range(low, high + 1)}
                missing = [slot for slot in range(number * size, last + 1) if slot not in has]
                await node.call("CLUSTER", "ADDSLOTS", *missing)
        for node in self.nodes[1:]:
            await self.nodes[0].call("CLUSTER", "MEET", "127.0.0.1", node.port, *self._bus_port(node))
        await self._until_known()
        for number, node in enumerate(self.nodes[self._primaries :]):
            await node.call("CLUSTER", "REPLICATE", await self._id(self.nodes[number % self._primaries]))
        first = self.nodes[: self._primaries]

        async def is_formed() -> bool:
            return all([await self.is_whole(node) for node in first])

        await until(is_formed, limit=LIMIT_SECONDS, what="whole cluster")

    async def _until_answers(self, node: Server) -> None:
        """Wait for a node; start it on other ports if another program has taken one of its ports."""

        async def answers() -> bool:
            assert node.process is not None
            if node.process.poll() is not None:
                node.port, node.options = lasting_port(), self._make_options()
                node.start()
            try:
                facts = await node.call("INFO", "server")
            except DeckhandsError:
                return False
            return b"process_id:%d\r" % node.process.pid in facts

        await until(answers, limit=LIMIT_SECONDS, what="node")

    async def _until_known(self) -> None:
        async def all_known() -> bool:
            lists = [await node.call("CLUSTER", "NODES") for node in self.nodes]
            return all(
                text.count(b"\n") == len(self.nodes) and b"handshake" not in text and b"disconnected" not in text
                for text in lists
            )

        await until(all_known, limit=LIMIT_SECONDS, what="nodes that know each other")

    async def is_whole(self, primary: Server) -> bool:
        """Return whether a primary has its replicas, and all nodes know all nodes as well."""
        for node in self.nodes:
            ranges = await node.call("CLUSTER", "SLOTS")
            if len(ranges) != self._primaries or any(len(found) != 3 + self._replicas for found in ranges):
                return False
            if primary.port not in {int(found[2][1]) for found in ranges}:
                return False
            if b"cluster_state:ok" not in await node.call("CLUSTER", "INFO"):
                return False
        return await primary.replicas() == self._replicas

    @staticmethod
    async def _order(node: Server, *command: str | int) -> Any:
        """Send a command to a node that lives, and wait for its reply as long as a busy machine takes."""
        return await node.call(*command, limit_seconds=unhurried(10))

    @staticmethod
    async def _id(node: Server) -> str:
        found: Any = await Cluster._order(node, "CLUSTER", "MYID")
        return str(found.decode())

    @staticmethod
    def _bus_port(node: Server) -> tuple[str]:
        return (node.options[node.options.index("--cluster-port") + 1],)


class SlotGroup:
    """The primary of one slot and its replicas, which fail over as a `SentinelGroup` does."""

    def __init__(self, cluster: Cluster, slot: int) -> None:
        self._cluster, self._slot = cluster, slot
        self.url = cluster.url

    async def primary(self) -> Server:
        """Return the primary."""
        return await self._cluster._find_owner(self._slot)

    async def find_primaries(self) -> list[Server]:
        """Return the servers that say of themselves that they serve the slot."""
        found = await asyncio.gather(*(self._cluster.find_replicas(node, self._slot) for node in self._cluster.nodes))
        return [node for node, replicas in zip(self._cluster.nodes, found, strict=True) if replicas is not None]

    async def order(self, old: Server) -> Server:
        """Order a replica to replace the primary in agreement with it; return the new one."""
        loop = asyncio.get_running_loop()
        while True:
            replicas = await self._cluster.find_replicas(old, self._slot)
            for node in replicas or ():
                with contextlib.suppress(DeckhandsError):  # one that is not connected refuses
                    await node.call("CLUSTER", "FAILOVER")
                    until_given_up = loop.time() + ORDER_SECONDS
                    while loop.time() < until_given_up:
                        if await self._cluster.is_served(self._slot, other_than=old):
                            return await self.until_promoted(other_than=old)

    async def until_promoted(self, *, other_than: Server) -> Server:
        """Wait until another server is the primary, and return it."""
        found: list[Server] = []

        async def is_promoted() -> bool:
            found[:] = [node for node in await self.find_primaries() if node is not other_than]
            return bool(found)

        await until(is_promoted, limit=LIMIT_SECONDS, what="promotion")
        return found[0]

    def restart(self, old: Server, new: Server) -> None:
        """Start a primary that was killed; the others tell it that it was replaced."""
        del new
        old.start()

    async def until_whole(self) -> Server:
        """Wait until there is one primary with all replicas, which all nodes know, and return it."""
        found: list[Server] = []

        async def is_whole() -> bool:
            found[:] = await self.find_primaries()
            if len(found) != 1 or not await self._cluster.is_whole(found[0]):
                return False
            replicas = await self._cluster.find_replicas(found[0], self._slot)
            return replicas is not None and len(replicas) == await found[0].replicas()

        await until(is_whole, limit=LIMIT_SECONDS, what="group that is whole")
        return found[0]
