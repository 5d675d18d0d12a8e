"""How an action reaches a tool worker: dispatched, claimed, handed on, settled; one carrier at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from broker.contract.actions import ToolCallAction
from broker.contract.codec import checksum_of
from broker.contract.events import ConversationCreated, WorkspaceSpec
from broker.contract.observations import ToolCallObservation
from broker.coordination.action_streams import (
    ActionClaimed,
    ActionReclaimed,
    ControlDelivery,
    NothingToDo,
    WorkspaceOrders,
)
from broker.coordination.crash_attribution import Mark
from broker.coordination.ownership import DispatchOutcome, Owners
from broker.log.append_call import Appended
from broker.log.conversations import Conversations
from broker.log.event_log import EventLog
from broker.store.connection import Connection
from broker.store.store import Store, open_store
from broker.testing.memory_store import MemoryConnection
from tests import broker_parts
from tests.broker_parts import CID, bury, command, copy_entry, dispatch_one, enter, output, own, take

GPU = ToolCallAction(name="render", tool="render", pool="gpu")
Queue = Callable[..., Any]


async def in_hand(store: Store) -> int:
    return await broker_parts.pending(store, store.all_shards[0].actions("pool:bash"), "tools")


async def test_action_is_delivered_with_all_it_needs(store: Store, queue: Queue) -> None:
    log = EventLog(store)
    workspace = WorkspaceSpec(path="/srv/project", network=True, pool="gpu")
    await log.create(ConversationCreated(conversation_id=CID, workspace=workspace), key="k")
    await enter(store, "w1")
    await enter(store, "t1", node="n1", pools=("gpu",))
    await broker_parts.act(store, "w1")
    delivery = await take(queue(pools=("gpu",)))
    assert (delivery.conversation_id, delivery.action_id, delivery.workspace) == (CID, 2, workspace)
    assert delivery.entry == await log.load_entry(CID, 2)
    assert delivery.location.startswith("deck:{0}:act:pool:gpu|")


async def test_the_observation_settles_and_acknowledges(store: Store, queue: Queue) -> None:
    log, ownership = await dispatch_one(store, t1="n1")
    reader = queue()
    delivery = await take(reader)
    assert await reader.claim(delivery) == ActionClaimed(1)
    assert await in_hand(store) == 1
    assert await log.append_observation(CID, output(2), worker_id="t1", place=delivery.location) == Appended(3, 3)
    assert await in_hand(store) == 0
    assert await reader.claim(delivery) == NothingToDo("settled")
    assert await Owners(store).dispatch(ownership, 2, delivery.entry) is DispatchOutcome.SETTLED
    kept = await store.connection.call("HGETALL", store.known_keys(CID).once)
    assert [name for name in kept[::2] if name[:2] in (b"q:", b"w:", b"n:", b"m:")] == []  # or the log's life long


async def test_dispatch_knows_where_an_action_is(store: Store, queue: Queue) -> None:
    log, ownership = await own(store)
    owners = Owners(store)
    await enter(store, "t1", node="n1")
    await log.append_as_owner(ownership, [command()], expected_last_id=1)
    entry = await log.load_entry(CID, 2)
    found = [await owners.dispatch(ownership, 2, entry), await owners.dispatch(ownership, 2, entry)]
    assert found == [DispatchOutcome.ENQUEUED, DispatchOutcome.QUEUED]
    reader = queue()
    delivery = await take(reader)
    assert await owners.dispatch(ownership, 2, entry) is DispatchOutcome.RUNNING
    await reader.claim(delivery)
    assert await owners.dispatch(ownership, 2, entry) is DispatchOutcome.RUNNING
    await log.append_observation(CID, output(2), worker_id="t1", place=delivery.location)
    assert await owners.dispatch(ownership, 2, entry) is DispatchOutcome.SETTLED
    await owners.release(ownership, seen_id=3)
    assert await owners.dispatch(ownership, 2, entry) is DispatchOutcome.FENCED


async def test_a_lost_entry_is_enqueued_again(store: Store, queue: Queue) -> None:
    log, ownership = await dispatch_one(store, t1="n1")
    stream = store.all_shards[0].actions("pool:bash")
    entry = await log.load_entry(CID, 2)
    await store.connection.call("XTRIM", stream, "MAXLEN", "=", 0)
    assert await Owners(store).dispatch(ownership, 2, entry) is DispatchOutcome.ENQUEUED
    reader = queue()
    assert await reader.claim(await take(reader)) == ActionClaimed(1)
    await store.connection.call("DEL", stream)
    assert await Owners(store).dispatch(ownership, 2, entry) is DispatchOutcome.RUNNING


async def test_an_entry_in_a_dead_workers_hands_is_enqueued_again(store: Store, queue: Queue) -> None:
    log, ownership = await dispatch_one(store, t1="n1")
    await take(queue())
    await store.connection.call("ZREM", store.all_shards[0].workers, "t1")
    assert await Owners(store).dispatch(ownership, 2, await log.load_entry(CID, 2)) is DispatchOutcome.ENQUEUED


async def test_later_actions_go_to_the_node_of_the_first(store: Store, queue: Queue) -> None:
    log, ownership = await dispatch_one(store, t1="n1")
    reader = queue()
    delivery = await take(reader)
    await reader.claim(delivery)
    await log.append_observation(CID, output(2), worker_id="t1", place=delivery.location)
    await log.append_as_owner(ownership, [command()], expected_last_id=3, dispatch=[0])
    assert (await take(reader)).location.startswith(f"{store.all_shards[0].actions('node:n1')}|")
    assert (await Conversations(store).load_row(CID)).node == "n1"


async def test_an_action_taken_up_on_the_wrong_node_is_forwarded(store: Store, queue: Queue) -> None:
    log, ownership = await own(store)
    await enter(store, "t1", node="n1")
    await enter(store, "t2", node="n2")
    await log.append_as_owner(ownership, [command("a"), command("b")], expected_last_id=1, dispatch=[0, 1])
    one, two = queue(), queue("t2", "n2")
    (first,) = await one.read(limit=1)
    (second,) = await two.read(limit=1)
    assert await one.claim(first) == ActionClaimed(1)
    assert await two.claim(second) == NothingToDo("forwarded")
    forwarded = await take(one)
    assert (forwarded.action_id, forwarded.entry, forwarded.workspace) == (3, second.entry, second.workspace)
    assert await one.claim(forwarded) == ActionClaimed(1)
    assert await in_hand(store) == 1  # the first, still running


async def test_a_running_action_is_run_by_no_other_worker(store: Store, queue: Queue) -> None:
    nodes = {"t1": "n1", "t2": "n2", "t3": "n1"}
    await dispatch_one(store, **nodes)
    one, *others = (queue(*each) for each in nodes.items())
    running = await take(one)
    assert await one.claim(running) == ActionClaimed(1)
    fields = (await store.connection.call("XRANGE", store.all_shards[0].actions("pool:bash"), "-", "+"))[0][1]
    for reader in others:  # on another node, on the same node
        await store.connection.call("XADD", store.all_shards[0].actions("pool:bash"), "*", *fields)
        assert await reader.claim(await take(reader)) == NothingToDo("busy")
    assert await in_hand(store) == 1
    assert await store.connection.call("HGET", store.known_keys(CID).once, "q:2") == running.location.encode()
    assert await store.connection.call("XLEN", store.all_shards[0].actions("node:n1")) == 0


async def test_action_of_a_missing_or_closed_conversation_is_dropped(store: Store, queue: Queue) -> None:
    await dispatch_one(store, t1="n1")
    reader = queue()
    delivery = await take(reader)
    await Conversations(store).close(CID)
    assert await reader.claim(delivery) == NothingToDo("closed")
    await store.connection.call("DEL", store.known_keys(CID).meta)
    assert await reader.claim(delivery) == NothingToDo("missing")
    assert await in_hand(store) == 0


async def test_orders_reach_the_node(store: Store, queue: Queue) -> None:
    log, ownership = await dispatch_one(store, t1="n1")
    reader = queue()
    await reader.claim(await take(reader))
    await log.append_as_owner(ownership, [broker_parts.message("stop")], expected_last_id=2, cancels=[2, 0])
    await Conversations(store).close(CID)
    orders = await reader.read(limit=5)
    assert [(order.action_id, order.order) for order in orders] == [(2, "cancel"), (0, "close"), (0, "close")]
    for order in orders:
        await reader.acknowledge(order)
    assert await broker_parts.pending(store, store.all_shards[0].actions("node:n1"), "tools") == 0


async def test_worker_claiming_twice_continues_with_its_first_claim(store: Store, queue: Queue) -> None:
    log, _ = await dispatch_one(store, t1="n1")
    reader = queue()
    delivery = await take(reader)
    assert await reader.claim(delivery) == ActionClaimed(1)
    assert await reader.claim(delivery) == ActionReclaimed(1, "t1")
    await copy_entry(store)
    copy = await take(reader)
    assert await reader.claim(copy) == ActionReclaimed(1, "t1")
    assert await in_hand(store) == 1
    await log.append_observation(CID, output(2), worker_id="t1", place=copy.location)
    assert await in_hand(store) == 0


async def test_a_claim_whose_reply_was_lost_is_still_a_claim(
    store: Store, queue: Queue, connect: Callable[[], Connection], closing: Callable[[Any], Any]
) -> None:
    await dispatch_one(store, t1="n1", t2="n1")
    losing = closing(await open_store(broker_parts.LosingConnection(connect(), broker_parts.every_first("FCALL"))))
    first, heir = queue(of=losing), queue("t2", of=losing)
    assert await first.claim(await take(first)) == ActionReclaimed(1, "t1")
    await bury(store, "t1")
    assert await heir.claim(await take(heir)) == ActionReclaimed(2, "t2")


async def test_actions_whose_delivery_was_lost_are_read_again(
    store: Store, queue: Queue, connect: Callable[[], Connection], closing: Callable[[Any], Any]
) -> None:
    log, ownership = await own(store)
    await enter(store, "t1", node="n1")
    actions = [command(str(n)) for n in range(5)]
    await log.append_as_owner(ownership, actions, expected_last_id=1, dispatch=range(5))
    lossy = broker_parts.LosingConnection(connect(), broker_parts.first_only("XREADGROUP"))
    reader = queue(of=closing(await open_store(lossy)))
    # The entries of the lost reply come first, page by page; then the new ones.
    found = [delivery.action_id for _ in range(4) for delivery in await reader.read(limit=2)]
    assert found == [2, 3, 4, 5, 6]


@pytest.fixture
def other(connect: Callable[[], Connection], closing: Callable[[Any], Any]) -> Connection:
    """Return a connection that survives a `reconnect`."""
    made: Connection = closing(connect())
    return made


async def reconnect(store: Store, other: Connection) -> None:
    """Let the store break every connection but one, and wait until its worker has noticed, as with the next beat."""
    connects = store.connection.connects
    if isinstance(other, MemoryConnection):
        other.server.restarts += 1
    else:
        await other.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    while store.connection.connects == connects:
        await store.retry(lambda: store.connection.call("EXISTS", "nothing"))


async def test_deliveries_of_an_older_store_are_read_again(store: Store, queue: Queue, other: Connection) -> None:
    """The reader was busy with its actions while the store was away, so it has seen no call fail."""
    await dispatch_one(store, t1="n1")
    reader, stream = queue(), store.all_shards[0].actions("pool:bash")
    await reader.acknowledge(await take(reader))
    await copy_entry(store)
    assert await other.call("XREADGROUP", "GROUP", "tools", "t1", "STREAMS", stream, ">")
    await reconnect(store, other)
    assert (await take(reader)).action_id == 2


async def test_a_missing_stream_hides_no_lost_delivery_of_another(
    store: Store, queue: Queue, other: Connection
) -> None:
    await dispatch_one(store, t1="n1")
    reader, names = queue(), store.all_shards[0]
    assert await other.call("XREADGROUP", "GROUP", "tools", "t1", "STREAMS", names.actions("pool:bash"), ">")
    await reconnect(store, other)
    await other.call("DEL", names.actions("node:n1"))
    assert await reader.read(limit=5) == []
    await enter(store, "t1", node="n1")
    assert (await take(reader)).action_id == 2


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_sessions_on_an_unserved_node_are_not_ended(store: Store, queue: Queue, is_waiting: bool) -> None:
    await broker_parts.begin(store)
    names = store.known_keys(CID)
    await store.connection.call("HSET", names.meta, "node", "gone")
    if is_waiting:  # an order that no worker has taken
        await store.connection.call("XADD", names.shard.actions("node:gone"), "*", "c", CID, "a", 0, "x", "cancel")
    assert not await WorkspaceOrders(store).end_sessions(CID, limit_seconds=0.1)
    await enter(store, "t1", node="gone")
    orders = await queue(node="gone").read(limit=8)
    assert orders[-1].order == "close"  # a worker of the node that comes later ends them


async def test_order_is_done_when_the_receiving_worker_did_it(store: Store, queue: Queue) -> None:
    await dispatch_one(store, t1="n1", t2="n1")
    reader = queue()
    await reader.claim(await take(reader))
    order = asyncio.create_task(WorkspaceOrders(store).end_sessions(CID, limit_seconds=20))
    (handed,) = await reader.read(limit=1)
    await bury(store, "t1")
    heir = queue("t2")
    (again,) = [delivery for delivery in await heir.read(limit=8) if isinstance(delivery, ControlDelivery)]
    assert again.location != handed.location
    done, _ = await asyncio.wait({order}, timeout=0.2)
    assert not done
    await heir.acknowledge(again)
    assert await order


async def find_attempts(store: Store, queue: Queue, lives: Sequence[Sequence[Mark]]) -> list[int]:
    """Let a worker die before each of these lives; return the attempt of each, which then leaves its marks."""
    await dispatch_one(store, t1="n1")
    undertaker = await enter(store, "t0", node="n1")
    reader = queue()
    assert await reader.claim(await take(reader)) == ActionClaimed(1)
    found = []
    for number, marks in enumerate(lives, 1):
        await bury(store, f"t{number}", by=undertaker)
        await enter(store, f"t{number + 1}", node="n1")
        reader = queue(f"t{number + 1}")
        delivery = await take(reader)
        found.append((await reader.claim(delivery)).attempt)
        for mark in marks:
            assert await reader.mark(delivery, mark)
    return found


@pytest.mark.parametrize(
    ("acting", "attempts"),
    [
        ([True, True, True, True], [2, 3, 4, 5]),
        ([True, False, False, False], [2, 2, 2, 2]),
        ([True, False, True, False, True], [2, 2, 3, 3, 4]),
    ],
)
async def test_the_first_death_counts_and_then_those_with_a_mark(
    store: Store, queue: Queue, acting: list[bool], attempts: list[int]
) -> None:
    """A worker dies for each item, with the action acting or only waiting."""
    lives = [[Mark.ACTING] if is_acting else [Mark.ACTING, Mark.WAITING] for is_acting in [*acting[1:], True]]
    assert await find_attempts(store, queue, lives) == attempts


@pytest.mark.parametrize(
    ("dies_after_the_wait", "attempts"),
    [
        ([False, False, False, False, False], [2, 2, 3, 2, 3]),
        ([False, True, True, True], [2, 2, 3, 4]),
        ([False, False, True, False, True], [2, 2, 3, 3, 4]),
    ],
)
async def test_wait_for_others_acquits_of_what_came_before(
    store: Store, queue: Queue, dies_after_the_wait: list[bool], attempts: list[int]
) -> None:
    """Every second worker that dies before the wait has reached the wait of the worker before it."""
    lives = [
        [Mark.ACTING, Mark.ACQUITTED, Mark.ACTING_AGAIN]
        if dies_after
        else [Mark.ACTING, Mark.ACQUITTED]
        if number % 2
        else [Mark.ACTING]
        for number, dies_after in enumerate(dies_after_the_wait, 1)
    ]
    assert await find_attempts(store, queue, lives) == attempts


async def test_only_the_holder_of_an_action_marks_it(store: Store, queue: Queue) -> None:
    log, _ = await dispatch_one(store, t1="n1")
    holder, other = queue(), queue("t2")
    delivery = await take(holder)
    assert not await holder.mark(delivery, Mark.ACTING)
    await holder.claim(delivery)
    assert not await other.mark(delivery, Mark.ACTING)
    assert await holder.mark(delivery, Mark.ACTING)
    await log.append_observation(CID, output(2), worker_id="t1", place=delivery.location)
    assert not await holder.mark(delivery, Mark.WAITING)
    left = await store.connection.call("HGETALL", store.known_keys(CID).once)
    checksum = checksum_of(await log.load_entry(CID, 2)).encode()
    assert left == [b"create:begin", b"1:1", b"o:2", b"3:3:" + checksum]


async def test_pool_action_runs_in_its_pool_without_binding_a_workspace(store: Store, queue: Queue) -> None:
    log, ownership = await own(store)
    await enter(store, "t1", node="n1")
    await enter(store, "g1", node="n2", pools=("gpu",))
    assert await log.append_as_owner(ownership, [GPU], expected_last_id=1, dispatch=[0]) == Appended(2, 2)
    reader = queue("g1", "n2", ("gpu",))
    delivery = await take(reader)
    assert delivery.is_anywhere
    assert delivery.location.startswith("deck:{0}:act:pool:gpu|")
    assert await reader.claim(delivery) == ActionClaimed(1)
    assert await broker_parts.node_of(store) is None
    answer = ToolCallObservation(content="done", name="render", cause=2)
    assert await log.append_observation(CID, answer, worker_id="g1", place=delivery.location) == Appended(3, 3)


async def test_workspace_bound_elsewhere_does_not_attract_a_pool_action(store: Store, queue: Queue) -> None:
    log, ownership = await dispatch_one(store, t1="n1")
    await enter(store, "g1", node="n2", pools=("gpu",))
    bash = queue()
    delivery = await take(bash)
    await bash.claim(delivery)
    await log.append_observation(CID, output(2), worker_id="t1", place=delivery.location)
    await log.append_as_owner(ownership, [GPU], expected_last_id=3)
    entry = await log.load_entry(CID, 4)
    assert await Owners(store).dispatch(ownership, 4, entry, pool="gpu") is DispatchOutcome.ENQUEUED
    assert await Owners(store).dispatch(ownership, 4, entry, pool="gpu") is DispatchOutcome.QUEUED
    gpu = queue("g1", "n2", ("gpu",))
    assert await gpu.claim(await take(gpu)) == ActionClaimed(1)
    assert await broker_parts.node_of(store) == b"n1"


async def test_dead_pool_workers_entries_go_to_the_same_pool(store: Store, queue: Queue) -> None:
    log, ownership = await own(store)
    for worker_id, node in (("g1", "n1"), ("g2", "n2")):
        await enter(store, worker_id, node=node, pools=("gpu",))
    await log.append_as_owner(ownership, [GPU], expected_last_id=1, dispatch=[0])
    first, second = queue("g1", pools=("gpu",)), queue("g2", "n2", ("gpu",))
    await first.claim(await take(first))
    await bury(store, "g1")
    delivery = await take(second)
    assert delivery.is_anywhere
    assert await second.claim(delivery) == ActionReclaimed(2, "g1")
    assert await log.load_last_id(CID) == 2
