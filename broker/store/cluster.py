"""A connection to a Redis Cluster: one multiplexed connection to each primary, and the map of slots.

Each command goes to the node that serves the slot of its first key. A batch is split by node, and the parts are sent at
the same time. A command without a key goes to the node of its neighbour in the batch, or to that of `deck:store` if it
is alone.

Holds: commands to one key are executed in the order of the batch; replies are in the order of the commands. A command
is sent again only after MOVED or ASK, which say that it was not executed. A function is never sent after ASK: its keys
may be on both nodes while a slot moves key by key, so the function might see only some of them. It fails as
`StoreUnavailable` until the slot has moved. For this, each function declares the base of its shard, which never exists
as a key. The map is read again after MOVED and after a lost connection; a node that is no longer a primary is left at
once. A primary that has just been restarted tells the map of its last hour, with itself as the primary, and serves
nothing yet: a map that changes something counts only from a node that serves, unless none does. If a primary lacks the
functions, the first call of a process that may load them and has the store's version loads
them.
Does not: read from replicas, or execute a batch atomically across nodes.
Source: the Redis Cluster specification.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import hiredis

from broker.runtime import (
    Acks,
    DeckhandsError,
    StoreError,
    StoreMisconfigured,
    StoreRefused,
    StoreUnavailable,
    load_current_url,
)
from broker.store import keys
from broker.store.connection import (
    REPLY_TIMEOUT_SECONDS,
    Argument,
    Connection,
    Endpoint,
    MultiplexedConnection,
    check_reply,
)
from broker.store.function_library import VERSION_FIELD, FunctionsVersion, build_source, own_version
from broker.store.routing import (
    CLUSTER_REMEDY,
    SLOTS,
    ClusterUrl,
    find_command_slot,
    find_slot,
    is_cluster_url,
    parse_node,
)
from broker.store.sentinel import Host

ANSWER_SECONDS = 2.0
"""How long one node may take for the map of slots before the next one is asked."""
PAUSE_SECONDS = 0.1
"""The least time between two readings of the map."""
MAX_HOPS = 5
"""How often one command is redirected."""
MAX_TAGS = 4_096

HOME_SLOT = find_slot(keys.STORE)
Command = Sequence[Argument]

_FUNCTIONS = ("FCALL", "FCALL_RO")
_NO_FUNCTION = "ERR Function not found"
_log = logging.getLogger(__name__)


def connect(url: str, *, reply_timeout_seconds: float = REPLY_TIMEOUT_SECONDS, acks: Acks = "local") -> Connection:
    """Return a connection to a store, of the kind that its URL names.

    Raises:
        StoreMisconfigured: the URL cannot be used.
    """
    kind = ClusterConnection if is_cluster_url(url) else MultiplexedConnection
    return kind(url, reply_timeout_seconds=reply_timeout_seconds, acks=acks)


class ClusterConnection:
    """A `Connection` to a cluster. It connects to a node with the first command for it."""

    is_cluster = True

    def __init__(
        self, store: str | _Topology, *, reply_timeout_seconds: float = REPLY_TIMEOUT_SECONDS, acks: Acks = "local"
    ) -> None:
        self._is_first = isinstance(store, str)
        self._topology = _Topology(store) if isinstance(store, str) else store
        self._topology.connections.add(self)
        self._reply_timeout_seconds = reply_timeout_seconds
        self._acks: Acks = acks
        self._links: dict[Host, MultiplexedConnection] = {}
        self._loading: dict[Host, asyncio.Task[bool]] = {}
        self._left = 0

    @property
    def connects(self) -> int:
        """See `Connection.connects`."""
        return self._left + sum(link.connects for link in self._links.values())

    async def call(self, *command: Argument) -> Any:
        """See `Connection.call`."""
        if is_for_all(command) or command[0] == "SCAN":
            return (await self.call_many([command]))[0]
        slot = find_command_slot(command)
        node = await self._find_node(HOME_SLOT if slot is None else slot)
        (reply,) = await self._exchange(node, [command])
        return await self._settle(command, node, reply) if isinstance(reply, hiredis.ReplyError) else reply

    async def call_many(self, commands: Sequence[Command]) -> list[Any]:
        """See `Connection.call_many`. Commands for all nodes are executed before the others."""
        replies: list[Any] = [None] * len(commands)
        others = []
        for at, command in enumerate(commands):
            if is_for_all(command):
                replies[at] = await self._call_all(command)
            elif command[0] == "SCAN":
                replies[at] = await self._scan(command)
            else:
                others.append(at)
        grouped = await self.group_by_node([commands[at] for at in others])
        parts = {node: [others[number] for number in numbers] for node, numbers in grouped.items()}
        if len(parts) == 1:
            ((node, places),) = parts.items()
            answers: list[Any] = [await self._exchange(node, [commands[at] for at in places])]
        else:
            sent = (self._exchange(node, [commands[at] for at in places]) for node, places in parts.items())
            answers = await asyncio.gather(*sent, return_exceptions=True)
        nodes: dict[int, Host] = {}
        for (node, places), answer in zip(parts.items(), answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, Exception):
                raise answer
            for number, at in enumerate(places):
                nodes[at] = node
                replies[at] = answer if isinstance(answer, Exception) else answer[number]
        for at in others:
            if isinstance(reply := replies[at], hiredis.ReplyError):
                replies[at] = await self._settle(commands[at], nodes[at], reply)
            elif isinstance(reply, Exception):
                raise reply
        return replies

    async def group_by_node(self, commands: Sequence[Command]) -> dict[Host, list[int]]:
        """Return the positions of the commands in a batch, grouped by node.

        Raises:
            StoreUnavailable: no node serves a slot.
        """
        parts: dict[Host, list[int]] = {}
        for at, slot in enumerate(_find_slots(commands)):
            parts.setdefault(await self._find_node(slot), []).append(at)
        return parts

    async def call_each(self, *command: Argument) -> dict[Host, Any]:
        """Send a command to all primaries, and return the reply of each."""
        await self._topology.load()
        primaries = self._topology.primaries
        replies = await asyncio.gather(*(self._exchange(node, [command]) for node in primaries))
        return {node: check_reply(reply) for node, (reply,) in zip(primaries, replies, strict=True)}

    async def promote_replica(self, share: float) -> Host:
        """Let a replica replace its primary, in agreement with it, and return the replica.

        Args:
            share: chooses one of the replicas; from 0 (inclusive) to 1 (exclusive).

        Raises:
            StoreMisconfigured: no primary has a replica.
            StoreRefused: the replica refuses, as during another replacement.
        """
        asked = await self._find_node(HOME_SLOT)
        (reply,) = await self._exchange(asked, [("CLUSTER", "SLOTS")])
        replicas = sorted({parse_node(each, asked) for _, _, _, *others in check_reply(reply) for each in others})
        if not replicas:
            raise StoreMisconfigured("no primary of the cluster has a replica", remedy="Add replicas.")
        chosen = replicas[int(share * len(replicas))]
        link = MultiplexedConnection(self._topology.find_endpoint(chosen), reply_timeout_seconds=ANSWER_SECONDS)
        try:
            await link.call("CLUSTER", "FAILOVER")
        finally:
            await link.aclose()
        return chosen

    def another(self, *, reply_timeout_seconds: float) -> ClusterConnection:
        """See `Connection.another`."""
        return ClusterConnection(self._topology, reply_timeout_seconds=reply_timeout_seconds)

    async def aclose(self) -> None:
        """See `Connection.aclose`."""
        self._topology.connections.discard(self)
        if self._is_first:
            await self._topology.aclose()
        for link in list(self._links.values()):
            await link.aclose()

    def leave(self, nodes: Iterable[Host], error: Exception) -> None:
        """End the connections to nodes that are no primaries any more."""
        for node in nodes:
            if (link := self._links.pop(node, None)) is not None:
                self._left += link.connects
                link.abort(error)

    async def _find_node(self, slot: int) -> Host:
        if not self._topology.primaries:
            await self._topology.load()
        return self._topology.find_node(slot)

    async def _exchange(self, node: Host, commands: Sequence[Command]) -> list[Any]:
        link = self._links.get(node)
        if link is None:
            endpoint = self._topology.find_endpoint(node)
            link = MultiplexedConnection(endpoint, reply_timeout_seconds=self._reply_timeout_seconds, acks=self._acks)
            self._links[node] = link
        try:
            return await link.exchange(commands)
        except StoreError:
            self._topology.refresh_soon(unlike=node)
            raise

    async def _settle(self, command: Command, node: Host, reply: Any) -> Any:
        """Follow a redirection, or load missing functions, until there is a reply; raise any other error."""
        loaded: set[Host] = set()
        for _ in range(MAX_HOPS):
            if not isinstance(reply, hiredis.ReplyError):
                return reply
            kind, _, rest = str(reply).partition(" ")
            if kind == "MOVED":
                node = self._topology.follow(rest, node)
                (reply,) = await self._exchange(node, [command])
            elif kind == "ASK":
                if command[0] in _FUNCTIONS:
                    raise StoreUnavailable(f"Slot {rest.partition(' ')[0]} of the store's cluster is being moved.")
                asked = _parse_place(rest.split()[1], node)
                _, reply = await self._exchange(asked, [("ASKING",), command])
            elif str(reply).startswith(_NO_FUNCTION) and command[0] in _FUNCTIONS and node not in loaded:
                if not await self._load_once(node):
                    return check_reply(reply)
                loaded.add(node)  # if it is still missing, this version has no such function
                (reply,) = await self._exchange(node, [command])
            else:
                if kind == "CROSSSLOT":
                    raise StoreRefused(f"The store answered: {reply}")
                if kind == "CLUSTERDOWN":
                    self._topology.refresh_soon(unlike=node)
                return check_reply(reply)
        raise StoreUnavailable(f"The nodes of the store's cluster redirect to each other: {reply}")

    async def _load_once(self, node: Host) -> bool:
        """Call `_load_functions` once for all waiting calls, because a thousand loads would block the node."""
        task = self._loading.get(node)
        if task is None or task.done():
            task = self._loading[node] = asyncio.create_task(self._load_functions(node))
        return await asyncio.shield(task)

    async def _load_functions(self, node: Host) -> bool:
        """Load the functions into a primary that lacks them; return whether a repetition of the call may succeed.

        Another call or process may have loaded them since the primary replied.

        Raises:
            StoreUnavailable: this process lacks the version or the right to load them; another process can.
        """
        stamp = await self.call("HGET", keys.STORE, VERSION_FIELD)
        if stamp is None:
            return False  # the store was never set up
        (listed,) = await self._exchange(node, [("FUNCTION", "LIST")])
        if isinstance(listed, list) and listed:
            return True
        error = StoreUnavailable(
            f"The node {node[0]}:{node[1]} of the store's cluster lacks the functions.",
            remedy="Run `deckhands setup` with a store user that may load functions.",
        )
        if FunctionsVersion.parse(stamp.decode(errors="replace")).code != own_version().code:
            raise error
        (reply,) = await self._exchange(node, [("FUNCTION", "LOAD", "REPLACE", build_source())])
        try:
            check_reply(reply)
        except StoreMisconfigured:
            raise error from None
        _log.info("loaded the functions into the node %s:%s of the store's cluster", *node)
        return True

    async def _call_all(self, command: Command) -> Any:
        """Return one reply for all primaries: for a list of functions, the shortest."""
        replies = list((await self.call_each(*command)).values())
        return min(replies, key=len) if command[1] == "LIST" else replies[0]

    async def _scan(self, command: Command) -> list[Any]:
        """Scan one primary after the other; a cursor names the primary and its cursor."""
        await self._topology.load()
        cursor = command[1].decode() if isinstance(command[1], bytes) else str(command[1])
        shown = {f"{host}:{port}": (host, port) for host, port in sorted(self._topology.primaries)}
        at, _, position = cursor.rpartition("/")
        name = min((one for one in shown if one >= at), default=None)
        if name is None:  # the last node has left meanwhile
            return [b"0", []]
        start = position if name == at else "0"
        (reply,) = await self._exchange(shown[name], [("SCAN", start, *command[2:])])
        following, found = check_reply(reply)
        if following != b"0":
            return [f"{name}/{following.decode()}".encode(), found]
        later = min((one for one in shown if one > name), default=None)
        return [b"0" if later is None else f"{later}/0".encode(), found]


class _Topology:
    """The map from slots to nodes, shared by the connections of one process to one cluster."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._seeds = _read_seeds(url)
        self._endpoints: dict[Host, Endpoint] = {}
        self._slots: list[Host | None] = [None] * SLOTS
        self._replicas: tuple[Host, ...] = ()
        self._ids: dict[Host, bytes] = {}
        self._reading: asyncio.Task[None] | None = None
        self._read_at = -PAUSE_SECONDS
        self._turn = 0
        self.primaries: tuple[Host, ...] = ()
        self.connections: weakref.WeakSet[ClusterConnection] = weakref.WeakSet()

    def find_node(self, slot: int) -> Host:
        """Return the node of a slot.

        Raises:
            StoreUnavailable: no node serves it.
        """
        node = self._slots[slot]
        if node is None:
            self.refresh_soon()
            raise StoreUnavailable(f"No node of the store's cluster serves slot {slot}.")
        return node

    def find_endpoint(self, node: Host) -> Endpoint:
        """Return the state that the connections to a node share."""
        if node not in self._endpoints:
            endpoint = Endpoint(self._url, node)
            # A node that is new may lack the users or the password of the others for a while.
            endpoint.has_served = any(other.has_served for other in self._endpoints.values())
            endpoint.node_id = self._ids.get(node)
            self._endpoints[node] = endpoint
            self._choose_acked_keys()
        return self._endpoints[node]

    def follow(self, rest: str, source: Host) -> Host:
        """Return the node that a MOVED names, and use it for this slot from now on."""
        slot, place = rest.split()[:2]
        node = _parse_place(place, source)
        self._slots[int(slot)] = node
        self.refresh_soon()
        return node

    def refresh_soon(self, *, unlike: Host | None = None) -> None:
        """Read the map again after a pause, unless a read is in progress.

        Args:
            unlike: a node that did not answer; it is asked last.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._refresh(unlike))

    async def load(self) -> None:
        """Read the map if it is unknown.

        Raises:
            StoreUnavailable: no node answers.
            StoreMisconfigured: the nodes refuse the login, or are no cluster.
        """
        if not self.primaries:
            await self._read(None)

    async def aclose(self) -> None:
        """Stop reading the map."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _refresh(self, unlike: Host | None) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._read_at + PAUSE_SECONDS - loop.time()))
        self._read_at = loop.time()
        with suppress(DeckhandsError):  # the next failing call asks again
            await self._read(unlike)

    async def _read(self, unlike: Host | None) -> None:
        with suppress(DeckhandsError):
            self._seeds = _read_seeds(self._url)
        places = list(dict.fromkeys((*self.primaries, *self._replicas, *self._seeds)))
        self._turn = (self._turn + 1) % len(places)
        places = places[self._turn :] + places[: self._turn]
        places.sort(key=lambda place: place == unlike)
        causes = []
        refusal: StoreMisconfigured | None = None
        doubtful: tuple[list[Any], Host] | None = None
        for place in places:
            link = MultiplexedConnection(self.find_endpoint(place), reply_timeout_seconds=ANSWER_SECONDS)
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    reply, serves = await link.exchange([("CLUSTER", "SLOTS"), ("EXISTS", keys.STORE)])
                ranges = check_reply(reply)
                if str(serves).startswith("CLUSTERDOWN") and not self._has_primaries(ranges, place):
                    doubtful = doubtful or (ranges, place)
                    continue
                self._update(ranges, place)
            except StoreMisconfigured as error:
                refusal = error
            except (StoreError, TimeoutError) as error:
                if "cluster support disabled" in str(error):
                    refusal = StoreMisconfigured(
                        f"The server at {place[0]}:{place[1]} is not a node of a cluster.",
                        remedy="Use redis://host:6379/0 for a single server.",
                    )
                causes.append(f"{place[0]}:{place[1]}: {str(error) or 'no answer'}")
            else:
                return
            finally:
                await link.aclose()
        if doubtful is not None:
            self._update(*doubtful)
            return
        if refusal is not None and not self.primaries:
            raise refusal
        raise StoreUnavailable(
            f"No node of the store's cluster tells its slots ({'; '.join(causes)}).", remedy=CLUSTER_REMEDY
        )

    def _has_primaries(self, ranges: list[Any], asked: Host) -> bool:
        """Return whether a map names the primaries that are known."""
        return {parse_node(primary, asked) for _, _, primary, *_ in ranges} == set(self.primaries)

    def _update(self, ranges: list[Any], asked: Host) -> None:
        slots: list[Host | None] = [None] * SLOTS
        primaries: dict[Host, None] = {}
        replicas: dict[Host, None] = {}
        for first, last, primary, *others in ranges:
            node = parse_node(primary, asked)
            primaries[node] = None
            self._ids[node] = primary[2]
            replicas |= dict.fromkeys(parse_node(other, asked) for other in others)
            slots[first : last + 1] = [node] * (last + 1 - first)
        if not primaries:
            raise StoreUnavailable(f"The node {asked[0]}:{asked[1]} knows no slots yet.")
        left = set(self.primaries) - set(primaries)
        self._slots, self.primaries, self._replicas = slots, tuple(primaries), tuple(replicas)
        for node, endpoint in self._endpoints.items():
            endpoint.node_id = self._ids.get(node)
        self._choose_acked_keys()
        if left:
            error = ConnectionResetError("it is no longer a primary of the store's cluster")
            for connection in list(self.connections):
                connection.leave(left, error)

    def _choose_acked_keys(self) -> None:
        """Give each node a key that it serves, for confirmations."""
        missing = {node for node in self.primaries if node in self._endpoints}
        for number in range(MAX_TAGS):
            if not missing:
                return
            key = f"{keys.ShardKeys(number).root}:acked"
            node = self._slots[find_slot(key)]
            if node in missing:
                missing.discard(node)
                self._endpoints[node].acked_key = key


def is_for_all(command: Command) -> bool:
    """Return whether a command concerns all primaries."""
    return command[0] == "FUNCTION"


def _find_slots(commands: Sequence[Command]) -> list[int]:
    """Return the slot of each command; one without a key follows the one before it, else the one after it."""
    own = [find_command_slot(command) for command in commands]
    slots = []
    latest = next((slot for slot in own if slot is not None), HOME_SLOT)
    for slot in own:
        latest = latest if slot is None else slot
        slots.append(latest)
    return slots


def _read_seeds(url: str) -> tuple[Host, ...]:
    try:
        return ClusterUrl.parse(load_current_url(url)).seeds
    except (ValueError, KeyError) as error:
        raise StoreMisconfigured(
            f"The URL of the store's cluster cannot be used: {error}.", remedy=CLUSTER_REMEDY
        ) from None


def _parse_place(place: str, source: Host) -> Host:
    """Return the node that a redirection names; without a host, the host is that of the answering node."""
    host, _, port = place.rpartition(":")
    return host.strip("[]") or source[0], int(port)
