"""A small cluster driven step by step: controllers, tool workers, zombies, crashes, copies and losses.

Holds: the result depends on the steps alone, so two stores can be driven by the same steps and compared; `settle` lets
new workers finish the rest, after which nothing may be missing.
Does not: wait. Reads take the present entries; heartbeats lapse on request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.contract.actions import CmdRunAction
from broker.contract.fencing import Ownership
from broker.contract.observations import CmdOutputObservation
from broker.coordination.action_streams import list_routes
from broker.coordination.crash_attribution import Mark
from broker.coordination.membership import Membership
from broker.coordination.ownership import ClaimedConversation, Owners
from broker.log.conversations import Conversations
from broker.log.event_log import EventLog
from broker.runtime.errors import UnknownConversation
from broker.store.store import Store
from tests.broker_parts import begin, command, lapse, message, output

CONVERSATIONS = ("conversation-a", "conversation-b")
NODES = {"t1": "n1", "t2": "n1", "t3": "n2"}
CONTROLLERS = ("c1", "c2")
SLOTS = (*CONTROLLERS, *NODES)
ROUNDS = 12

Step = tuple[Any, ...]


@dataclass(frozen=True)
class Handed:
    worker: str
    node: str
    conversation_id: str
    action_id: int
    stream: str
    entry: str


@dataclass
class World:
    """The cluster: the current workers, and the memory of every process."""

    store: Store
    memberships: dict[str, Membership] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    claims: list[ClaimedConversation] = field(default_factory=list)
    handed: list[Handed] = field(default_factory=list)
    notified: list[tuple[str, str, str]] = field(default_factory=list)
    read_to: dict[str, int] = field(default_factory=dict)
    """The last event of each conversation when it was given up."""

    @property
    def log(self) -> EventLog:
        return EventLog(self.store)

    @property
    def owners(self) -> Owners:
        return Owners(self.store)

    async def start(self) -> None:
        for slot in SLOTS:
            await self.restart(slot)

    async def do(self, step: Step) -> Any:
        """Perform one step; its result is the same on every store."""
        verb, *arguments = step
        try:
            return await getattr(self, verb)(*arguments)
        except UnknownConversation:
            return "unknown"

    # actions of users

    async def begin(self, cid: str) -> Any:
        if await self.store.connection.call("EXISTS", self.store.known_keys(cid).meta):
            return "exists"
        await begin(self.store, cid, message())
        return "begun"

    async def say(self, cid: str, key: str) -> Any:
        return await self.log.append(cid, [message()], key=key)

    async def close(self, cid: str) -> Any:
        await Conversations(self.store).close(cid)

    async def requeue(self, cid: str) -> Any:
        await Conversations(self.store).requeue(cid)

    # actions of workers

    async def restart(self, slot: str) -> Any:
        """A new worker takes the slot; the one before it lives on as a zombie until another buries it."""
        number = sum(name.startswith(f"{slot}.") for name in self.memberships)
        name = self.names[slot] = f"{slot}.{number}"
        streams = [self._streams(slot)]
        self.memberships[name] = Membership(
            self.store, name, "controller" if slot in CONTROLLERS else "tool", streams=streams, ttl_seconds=3600.0
        )
        await self.memberships[name].register()

    async def lapse(self, slot: str) -> Any:
        if await self._is_alive(self.names[slot]):
            await lapse(self.store, self.names[slot])

    async def tick(self, slot: str, patience_ms: int) -> Any:
        root = self.store.all_shards[0].root
        await self.store.connection.call("HDEL", f"{root}:clock", "quiet")  # every beat takes its turn
        outcome, *done = await self.store.call_function(
            "deck_tick", (root,), self.names[slot], 3_600_000, 1, patience_ms
        )
        return [outcome, *done[:3]]  # followed by the time

    async def leave(self, slot: str) -> Any:
        await self.memberships[self.names[slot]].leave()

    async def hear(self, slot: str, name: str = "") -> Any:
        worker = name or self.names[slot]
        ready = self.store.all_shards[0].ready
        found = await self._read("controllers", worker, [ready])
        self.notified += [(worker, fields[1].decode(), entry.decode()) for _, entry, fields in found]
        return [fields for _, _, fields in found]

    async def answer(self, n: int) -> Any:
        if not self.notified:
            return None
        worker, cid, entry = self.notified.pop(n % len(self.notified))
        return self._remember(await self.owners.claim(cid, worker, ready_entry=entry))

    async def claim(self, slot: str, cid: str) -> Any:
        return self._remember(await self.owners.claim(cid, self.names[slot]))

    async def decide(self, n: int, actions: int, cancels: bool) -> Any:
        """Append as a current or former owner."""
        if not self.claims:
            return None
        position = n % len(self.claims)
        claimed = self.claims[position]
        cid = claimed.ownership.conversation_id
        events = [command(str(number)) for number in range(actions)] or [message()]
        return await self.log.append_as_owner(
            claimed.ownership,
            events,
            expected_last_id=await self.log.load_last_id(cid),
            dispatch=range(actions),
            cancels=[2] if cancels else [],
        )

    async def settle_as_owner(self, n: int) -> Any:
        """Answer an open action in its worker's stead, as a stop does."""
        if not self.claims:
            return None
        ownership = self.claims[n % len(self.claims)].ownership
        cid = ownership.conversation_id
        open_ids = await self.open_actions(cid)
        if not open_ids:
            return None
        last_id = await self.log.load_last_id(cid)
        return await self.log.append_as_owner(
            ownership, [output(open_ids[0])], expected_last_id=last_id, answers={0: open_ids[0]}
        )

    async def release(self, n: int, due: int | None) -> Any:
        if not self.claims:
            return None
        ownership = self.claims[n % len(self.claims)].ownership
        cid = ownership.conversation_id
        seen_id = await self.log.load_last_id(cid)
        found = await self.owners.release(ownership, seen_id=seen_id, delay_seconds=due)
        self.read_to[cid] = seen_id if await self._owner(cid) == "" else 0
        return found

    async def mark(self, n: int) -> Any:
        return await self.owners.mark(self._claim(n), Mark.ACTING) if self.claims else None

    async def dispatch(self, n: int) -> Any:
        if not self.claims:
            return None
        ownership = self._claim(n)
        open_ids = await self.open_actions(ownership.conversation_id)
        if not open_ids:
            return None
        entry = await self.log.load_entry(ownership.conversation_id, open_ids[0])
        return await self.owners.dispatch(ownership, open_ids[0], entry)

    async def take(self, slot: str, name: str = "") -> Any:
        worker = name or self.names[slot]
        found = await self._read("tools", worker, self._streams(slot))
        for stream, entry, flat in found:
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            place = (stream.decode(), entry.decode())
            if b"x" in fields:
                await self.store.connection.call("XACK", place[0], "tools", place[1])
            else:
                cid, action_id = fields[b"c"].decode(), int(fields[b"a"])
                self.handed.append(Handed(worker, NODES[slot], cid, action_id, *place))
        return [fields[:4] for _, _, fields in found]

    async def run(self, n: int, keeps: bool) -> Any:
        """Claim an action in hand and, unless its worker forgets, append its observation."""
        if not self.handed:
            return None
        handed = self.handed.pop(n % len(self.handed))
        names = self.store.known_keys(handed.conversation_id)
        reply = await self.store.call_function(
            "deck_claim_action",
            (names.root, names.shard.root),
            handed.conversation_id,
            handed.action_id,
            handed.worker,
            handed.node,
            handed.stream,
            handed.entry,
        )
        if reply[0] not in ("claimed", "reclaimed"):
            return reply
        if keeps:
            self.handed.append(handed)  # still at it
            return reply
        observation = CmdOutputObservation(content="done", command="ls", cause=handed.action_id)
        place = f"{handed.stream}|{handed.entry}"
        return reply, await self.log.append_observation(
            handed.conversation_id, observation, worker_id=handed.worker, place=place
        )

    # spontaneous faults

    async def copy(self, stream: str) -> Any:
        key = self.store.all_shards[0].actions(stream)
        entries = await self.store.connection.call("XRANGE", key, "-", "+")
        if entries:
            await self.store.connection.call("XADD", key, "*", *entries[-1][1])

    async def lose(self, name: str) -> Any:
        """A stream loses its entries, as after a fail-over to a replica that was behind."""
        shard = self.store.all_shards[0]
        key = shard.ready if name == "ready" else shard.actions(name)
        await self.store.connection.call("XTRIM", key, "MAXLEN", "=", 0)

    # the end

    async def settle(self, *, dispatches: bool) -> None:
        """Let all remaining workers die and new ones finish the rest.

        Args:
            dispatches: whether every conversation gets an owner that checks its open actions; without losses
                nothing may depend on it.
        """
        for name in self.memberships:
            if await self._is_alive(name):
                await lapse(self.store, name)
        self.claims, self.handed, self.notified = [], [], []
        for slot in SLOTS:
            await self.restart(slot)
        await self._let_parked_become_due()
        for _ in range(ROUNDS):
            for slot in SLOTS:
                await self.tick(slot, 0)
            await self.hear("c1")
            while self.notified:
                await self.answer(0)
            for cid in CONVERSATIONS if dispatches else ():
                await self.claim("c1", cid)
            for n, claimed in enumerate(self.claims if dispatches else ()):
                if not claimed.is_closed:
                    await self.dispatch(n)
            for slot in NODES:
                await self.take(slot)
            while self.handed:
                await self.run(0, False)

    async def _let_parked_become_due(self) -> None:
        parked = self.store.all_shards[0].parked
        for cid in await self.store.connection.call("ZRANGE", parked, 0, -1):
            await self.store.connection.call("ZADD", parked, 0, cid)

    async def check(self) -> None:
        """Make sure that nothing was lost and nothing is left over."""
        shard = self.store.all_shards[0]
        for cid in CONVERSATIONS:
            if not await self.store.connection.call("EXISTS", self.store.known_keys(cid).meta):
                continue
            row = await Conversations(self.store).load_row(cid)
            assert row.owner or row.last_event_id == self.read_to.get(cid), f"nobody has heard of {cid}"
            observed = Counter(event.cause for event in await self.log.read(cid) if event.cause)
            assert all(count == 1 for count in observed.values()), observed
            if not row.is_closed:
                assert await self.open_actions(cid) == []
                once = await self.store.connection.call("HGETALL", self.store.known_keys(cid).once)
                assert not [name for name in once[::2] if name[:2] in (b"q:", b"w:", b"n:")]
        for key, group in [(shard.ready, "controllers"), *((name, "tools") for name in self._all_actions())]:
            assert (await self.store.connection.call("XPENDING", key, group))[0] == 0, key
            assert await self.store.connection.call("XLEN", key) <= 1, key
        assert await self.store.connection.call("ZRANGE", f"{shard.root}:unread", 0, -1) == []
        assert await self.store.connection.call("ZRANGE", shard.parked, 0, -1) == []

    async def open_actions(self, cid: str) -> list[int]:
        events = await self.log.read(cid)
        settled = {event.cause for event in events}
        return [event.id for event in events if isinstance(event, CmdRunAction) and event.id not in settled]

    def _streams(self, slot: str) -> list[str]:
        shard = self.store.all_shards[0]
        return [shard.actions(route) for route in list_routes(NODES[slot], ("bash",))] if slot in NODES else []

    def _all_actions(self) -> list[str]:
        shard = self.store.all_shards[0]
        return [shard.actions(route) for route in ("pool:bash", "node:n1", "node:n2")]

    def _claim(self, n: int) -> Ownership:
        return self.claims[n % len(self.claims)].ownership

    def _remember(self, found: Any) -> Any:
        if not isinstance(found, ClaimedConversation):
            return found
        self.claims.append(found)
        return found.last_id, found.crashes, found.node, found.is_closed

    async def _owner(self, cid: str) -> str:
        return (await Conversations(self.store).load_row(cid)).owner

    async def _is_alive(self, name: str) -> bool:
        score = await self.store.connection.call("ZSCORE", self.store.all_shards[0].workers, name)
        return score is not None and float(score) > 0

    async def _read(self, group: str, consumer: str, keys: Sequence[str]) -> list[tuple[bytes, bytes, list[bytes]]]:
        found = await self.store.connection.call(
            *("XREADGROUP", "GROUP", group, consumer, "COUNT", 3, "STREAMS", *keys, *(">" for _ in keys))
        )
        return [(stream, entry, fields) for stream, entries in found or () for entry, fields in entries]
