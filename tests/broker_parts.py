"""Helpers for tests of the broker: conversations, workers, and connections that lose replies.

Holds: no test waits for a heartbeat to lapse or a park to fall due; `lapse` moves the deadline into the past instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from broker.contract.actions import CmdRunAction, MessageAction
from broker.contract.events import ConversationCreated, Event, EventSource
from broker.contract.fencing import Ownership
from broker.contract.observations import CmdOutputObservation
from broker.coordination.action_streams import ActionDelivery, ActionQueue, list_routes
from broker.coordination.membership import Membership
from broker.coordination.ownership import ClaimedConversation, Owners
from broker.log.append_call import Appended
from broker.log.event_log import EventLog
from broker.runtime.errors import OutcomeUnknown
from broker.store.connection import Argument, Connection
from broker.store.store import Store
from broker.testing.manual_clock import ManualClock

CID = "conversation-1"
MADE_UP_TENANTS, KEPT_TENANTS = 5_000, 2_100


def message(text: str = "Hello") -> MessageAction:
    return MessageAction(content=text, source=EventSource.USER)


def command(text: str = "ls") -> CmdRunAction:
    return CmdRunAction(command=text)


def output(cause: int, text: str = "a.txt") -> CmdOutputObservation:
    return CmdOutputObservation(content=text, command="ls", cause=cause)


async def begin(store: Store, conversation_id: str = CID, *events: Event) -> EventLog:
    """Create a conversation with its first event and `events`."""
    log = EventLog(store)
    created = ConversationCreated(conversation_id=conversation_id)
    assert isinstance(await log.create(created, events, key="begin"), Appended)
    return log


async def enter(store: Store, worker_id: str, *, node: str = "", pools: Sequence[str] = ("bash",)) -> Membership:
    """Register a controller worker, or a tool worker when it is on a node."""
    names = [[shard.actions(route) for route in list_routes(node, pools)] if node else [] for shard in store.all_shards]
    role = "tools" if node else "controller"
    # Long-lived: only `lapse` ends a worker here.
    membership = Membership(store, worker_id, role, streams=names, ttl_seconds=3600.0)
    await membership.register()
    return membership


async def lapse(store: Store, worker_id: str) -> None:
    for shard in store.all_shards:
        await store.connection.call("ZADD", shard.workers, 1, worker_id)


async def pass_time(store: Store, clock: ManualClock, seconds: float, *, worker_id: str) -> None:
    """Let time pass, and send a heartbeat at its end: without one, the store's time does not advance."""
    clock.advance(seconds)
    for shard in store.all_shards:
        await store.call_function("deck_tick", (shard.root,), worker_id, 3_600_000, 1, 3_600_000)


async def claim(store: Store, worker_id: str, conversation_id: str = CID) -> Ownership:
    claimed = await Owners(store).claim(conversation_id, worker_id)
    assert isinstance(claimed, ClaimedConversation), claimed
    return claimed.ownership


async def own(store: Store, *events: Event) -> tuple[EventLog, Ownership]:
    """Create the conversation with `events`, owned by the controller worker w1."""
    log = await begin(store, CID, *events)
    await enter(store, "w1")
    return log, await claim(store, "w1")


async def dispatch_one(store: Store, **nodes: str) -> tuple[EventLog, Ownership]:
    """Create the conversation and dispatch its event 2, an action; `nodes` are the tool workers with their nodes."""
    log = await begin(store)
    await enter(store, "w1")
    for worker_id, node in nodes.items():
        await enter(store, worker_id, node=node)
    ownership, _ = await act(store, "w1")
    return log, ownership


async def bury(store: Store, worker_id: str, *, by: Membership | None = None) -> int:
    """Let a worker die, and another's beat hand back what it had; return how many workers the beat removed."""
    await lapse(store, worker_id)
    found = await (by or await enter(store, "undertaker")).beat(1)
    assert found is not None
    return found.removed_count


async def act(store: Store, worker_id: str, conversation_id: str = CID) -> tuple[Ownership, int]:
    """Claim a conversation and append one runnable action, dispatched; return its id too."""
    owners, log = Owners(store), EventLog(store)
    claimed = await owners.claim(conversation_id, worker_id)
    assert isinstance(claimed, ClaimedConversation), claimed
    outcome = await log.append_as_owner(claimed.ownership, [command()], expected_last_id=claimed.last_id, dispatch=[0])
    assert isinstance(outcome, Appended), outcome
    return claimed.ownership, outcome.last_id


def queue(store: Store, worker_id: str, *, node: str, pools: Sequence[str] = ("bash",)) -> ActionQueue:
    return ActionQueue(store, store.all_shards[0], worker_id=worker_id, node=node, pools=pools)


async def take(actions: ActionQueue) -> ActionDelivery:
    (delivery,) = await actions.read(limit=10)
    assert isinstance(delivery, ActionDelivery)
    return delivery


async def notified(store: Store) -> list[str]:
    """Return the conversations in the ready stream, delivered or not, in order."""
    entries = await store.connection.call("XRANGE", store.all_shards[0].ready, "-", "+")
    return [fields[1].decode() for _, fields in entries]


async def mail_of(store: Store, worker_id: str) -> list[str]:
    """Return the conversations in a worker's mailbox, in order."""
    entries = await store.connection.call("XRANGE", store.all_shards[0].mailbox(worker_id), "-", "+")
    return [fields[1].decode() for _, fields in entries]


async def pending(store: Store, stream: str, group: str) -> int:
    """Return how many entries of a stream were handed out and not acknowledged."""
    return int((await store.connection.call("XPENDING", stream, group))[0])


async def newly_notified(store: Store) -> list[str]:
    """Return the conversations that were notified since the last look, in order."""
    ids = await notified(store)
    await store.connection.call("DEL", store.all_shards[0].ready)
    for cid in ids:
        await store.connection.call("HDEL", store.known_keys(cid).meta, "rung")
    return ids


async def begin_unnotified(store: Store, *conversation_ids: str) -> None:
    """Create conversations whose workers have not been notified of them."""
    for cid in conversation_ids:
        await begin(store, cid)
    await newly_notified(store)


async def make_up_tenants(store: Store, shares: str) -> None:
    """Let many tenants have had one turn, and one of them many."""
    names = (part for number in range(MADE_UP_TENANTS) for part in (f"made-up-{number}", "1000.5"))
    await store.connection.call("HSET", shares, *names, "ahead", "2000.0")


async def copy_entry(store: Store) -> bytes:
    """Let the entry of the only action of the pool come twice."""
    stream = store.all_shards[0].actions("pool:bash")
    ((_, fields),) = await store.connection.call("XRANGE", stream, "-", "+")
    copied: bytes = await store.connection.call("XADD", stream, "*", *fields)
    return copied


async def node_of(store: Store) -> bytes | None:
    """Return the node of the conversation's workspace."""
    found: bytes | None = await store.connection.call("HGET", store.known_keys(CID).meta, "node")
    return found


class LosingConnection:
    """A connection that executes what `loses` picks and loses the reply."""

    def __init__(self, inner: Connection, loses: Callable[[Sequence[Argument]], bool]) -> None:
        self._inner = inner
        self._loses = loses
        self.lost = 0

    is_cluster = False

    @property
    def connects(self) -> int:
        return self._inner.connects

    async def call(self, *sent: Argument) -> Any:
        reply = await self._inner.call(*sent)
        if self._loses(sent):
            self.lost += 1
            raise OutcomeUnknown("The reply was lost.")
        return reply

    async def call_many(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        return await self._inner.call_many(commands)

    def another(self, *, reply_timeout_seconds: float) -> LosingConnection:
        return LosingConnection(self._inner.another(reply_timeout_seconds=reply_timeout_seconds), self._loses)

    async def aclose(self) -> None:
        await self._inner.aclose()


def every_first(name: str) -> Callable[[Sequence[Argument]], bool]:
    """Pick every other command of a name: each first try loses its reply, the second does not."""
    tries = {"n": 0}

    def loses(sent: Sequence[Argument]) -> bool:
        if sent[0] != name:
            return False
        tries["n"] += 1
        return tries["n"] % 2 == 1

    return loses


def first_only(name: str) -> Callable[[Sequence[Argument]], bool]:
    seen: list[str] = []

    def loses(sent: Sequence[Argument]) -> bool:
        if sent[0] != name or seen:
            return False
        seen.append(name)
        return True

    return loses


def no_key() -> None:
    """Return no key: for workers that keep no secrets."""
