"""How an action reaches a tool worker: dispatched, claimed, handed on, settled; one carrier at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from broker.contract.events import ConversationCreated, WorkspaceSpec
from broker.coordination.action_streams import (
    ActionClaimed,
    ActionDelivery,
    ActionReclaimed,
    ControlDelivery,
    NothingToDo,
)
from broker.coordination.ownership import DispatchOutcome, Owners
from broker.coordination.workspace_orders import WorkspaceOrders
from broker.log.append_call import Appended
from broker.log.conversations import Conversations
from broker.log.event_log import EventLog
from broker.store.connection import Connection
from broker.store.store import Store, open_store
from broker.testing.memory_store import MemoryConnection
from tests.broker_parts import (
    CID,
    LosingConnection,
    act,
    begin,
    claim,
    command,
    enter,
    every_first,
    first_only,
    lapse,
    message,
    output,
    pending,
    queue,
    take,
)


async def test_action_is_delivered_with_all_it_needs(store: Store) -> None:
    log = EventLog(store)
    workspace = WorkspaceSpec(path="/srv/project", network=True, pool="gpu")
    await log.create(ConversationCreated(conversation_id=CID, workspace=workspace), key="k")
    await enter(store, "w1")
    await enter(store, "t1", node="n1", pools=("gpu",))
    await act(store, "w1")
    reader = queue(store, "t1", node="n1", pools=("gpu",))
    delivery = await take(reader)
    assert (delivery.conversation_id, delivery.action_id, delivery.workspace) == (CID, 2, workspace)
    assert delivery.entry == await log.load_entry(CID, 2)
    assert delivery.location.startswith("deck:{0}:act:pool:gpu|")
    await reader.aclose()


async def test_the_observation_settles_and_acknowledges(store: Store) -> None:
    log = await begin(store)
    names = store.all_shards[0]
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    ownership, action_id = await act(store, "w1")
    reader = queue(store, "t1", node="n1")
    delivery = await take(reader)
    assert await reader.claim(delivery) == ActionClaimed(1)
    assert await pending(store, names.actions("pool:bash"), "tools") == 1
    observed = await log.append_observation(CID, output(action_id), worker_id="t1", place=delivery.location)
    assert observed == Appended(3, 3)
    assert await pending(store, names.actions("pool:bash"), "tools") == 0
    assert await reader.claim(delivery) == NothingToDo("settled")
    assert await Owners(store).dispatch(ownership, action_id, delivery.entry) is DispatchOutcome.SETTLED
    kept = await store.connection.call("HGETALL", store.keys(CID).once)
    assert [name for name in kept[::2] if name[:2] in (b"q:", b"w:", b"n:", b"m:")] == []  # or the log's life long
    await reader.aclose()


async def test_dispatch_knows_where_an_action_is(store: Store) -> None:
    log = await begin(store)
    owners = Owners(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    ownership = await claim(store, "w1")
    await log.append_as_owner(ownership, [command()], expected_last_id=1)
    entry = await log.load_entry(CID, 2)
    found = [await owners.dispatch(ownership, 2, entry), await owners.dispatch(ownership, 2, entry)]
    assert found == [DispatchOutcome.ENQUEUED, DispatchOutcome.QUEUED]
    reader = queue(store, "t1", node="n1")
    delivery = await take(reader)
    assert await owners.dispatch(ownership, 2, entry) is DispatchOutcome.RUNNING
    await reader.claim(delivery)
    assert await owners.dispatch(ownership, 2, entry) is DispatchOutcome.RUNNING
    await log.append_observation(CID, output(2), worker_id="t1", place=delivery.location)
    assert await owners.dispatch(ownership, 2, entry) is DispatchOutcome.SETTLED
    await owners.release(ownership, seen_id=3)
    assert await owners.dispatch(ownership, 2, entry) is DispatchOutcome.FENCED
    await reader.aclose()


async def test_a_lost_entry_is_enqueued_again(store: Store) -> None:
    await begin(store)
    names = store.all_shards[0]
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    ownership, action_id = await act(store, "w1")
    entry = await EventLog(store).load_entry(CID, action_id)
    await store.connection.call("XTRIM", names.actions("pool:bash"), "MAXLEN", "=", 0)
    assert await Owners(store).dispatch(ownership, action_id, entry) is DispatchOutcome.ENQUEUED
    reader = queue(store, "t1", node="n1")
    assert await reader.claim(await take(reader)) == ActionClaimed(1)
    await store.connection.call("DEL", names.actions("pool:bash"))
    assert await Owners(store).dispatch(ownership, action_id, entry) is DispatchOutcome.RUNNING
    await reader.aclose()


async def test_an_entry_in_a_dead_workers_hands_is_enqueued_again(store: Store) -> None:
    await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    ownership, action_id = await act(store, "w1")
    reader = queue(store, "t1", node="n1")
    await take(reader)
    await store.connection.call("ZREM", store.all_shards[0].workers, "t1")
    entry = await EventLog(store).load_entry(CID, action_id)
    assert await Owners(store).dispatch(ownership, action_id, entry) is DispatchOutcome.ENQUEUED
    await reader.aclose()


async def test_later_actions_go_to_the_node_of_the_first(store: Store) -> None:
    log = await begin(store)
    names = store.all_shards[0]
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    ownership, action_id = await act(store, "w1")
    reader = queue(store, "t1", node="n1")
    delivery = await take(reader)
    await reader.claim(delivery)
    await log.append_observation(CID, output(action_id), worker_id="t1", place=delivery.location)
    await log.append_as_owner(ownership, [command()], expected_last_id=3, dispatch=[0])
    assert (await take(reader)).location.startswith(f"{names.actions('node:n1')}|")
    assert (await Conversations(store).load_row(CID)).node == "n1"
    await reader.aclose()


async def test_an_action_taken_up_on_the_wrong_node_is_forwarded(store: Store) -> None:
    log = await begin(store)
    names = store.all_shards[0]
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    await enter(store, "t2", node="n2")
    ownership = await claim(store, "w1")
    await log.append_as_owner(ownership, [command("a"), command("b")], expected_last_id=1, dispatch=[0, 1])
    one, two = queue(store, "t1", node="n1"), queue(store, "t2", node="n2")
    (first,) = await one.read(limit=1)
    (second,) = await two.read(limit=1)
    assert isinstance(first, ActionDelivery)
    assert isinstance(second, ActionDelivery)
    assert await one.claim(first) == ActionClaimed(1)
    assert await two.claim(second) == NothingToDo("forwarded")
    forwarded = await take(one)
    assert (forwarded.action_id, forwarded.entry, forwarded.workspace) == (3, second.entry, second.workspace)
    assert await one.claim(forwarded) == ActionClaimed(1)
    assert await pending(store, names.actions("pool:bash"), "tools") == 1  # the first, still running
    for reader in (one, two):
        await reader.aclose()


async def test_a_running_action_is_run_by_nobody_else(store: Store) -> None:
    await begin(store)
    names = store.all_shards[0]
    await enter(store, "w1")
    for worker, node in (("t1", "n1"), ("t2", "n2"), ("t3", "n1")):
        await enter(store, worker, node=node)
    await act(store, "w1")
    stream = names.actions("pool:bash")
    ((_, fields),) = await store.connection.call("XRANGE", stream, "-", "+")
    one, two, three = (queue(store, name, node=node) for name, node in (("t1", "n1"), ("t2", "n2"), ("t3", "n1")))
    running = await take(one)
    assert await one.claim(running) == ActionClaimed(1)
    for reader in (two, three):  # on another node, on the same node
        await store.connection.call("XADD", stream, "*", *fields)
        assert await reader.claim(await take(reader)) == NothingToDo("busy")
    assert await pending(store, stream, "tools") == 1
    assert await store.connection.call("HGET", store.keys(CID).once, "q:2") == running.location.encode()
    assert await store.connection.call("XLEN", names.actions("node:n1")) == 0
    for reader in (one, two, three):
        await reader.aclose()


async def test_action_of_a_missing_or_closed_conversation_is_dropped(store: Store) -> None:
    await begin(store)
    names = store.all_shards[0]
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    await act(store, "w1")
    reader = queue(store, "t1", node="n1")
    delivery = await take(reader)
    await Conversations(store).close(CID)
    assert await reader.claim(delivery) == NothingToDo("closed")
    await store.connection.call("DEL", store.keys(CID).meta)
    assert await reader.claim(delivery) == NothingToDo("missing")
    assert await pending(store, names.actions("pool:bash"), "tools") == 0
    await reader.aclose()


async def test_orders_reach_the_node(store: Store) -> None:
    log = await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    ownership, action_id = await act(store, "w1")
    reader = queue(store, "t1", node="n1")
    await reader.claim(await take(reader))
    await log.append_as_owner(ownership, [message("stop")], expected_last_id=2, cancels=[action_id, 0])
    await Conversations(store).close(CID)
    orders = await reader.read(limit=5)
    assert [isinstance(order, ControlDelivery) and (order.action_id, order.order) for order in orders] == [
        (action_id, "cancel"),
        (0, "close"),
        (0, "close"),
    ]
    for order in orders:
        await reader.acknowledge(order)
    assert await pending(store, store.all_shards[0].actions("node:n1"), "tools") == 0
    await reader.aclose()


async def test_worker_claiming_twice_continues_with_its_first_claim(store: Store) -> None:
    await begin(store)
    stream = store.all_shards[0].actions("pool:bash")
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    await act(store, "w1")
    ((_, fields),) = await store.connection.call("XRANGE", stream, "-", "+")
    reader = queue(store, "t1", node="n1")
    delivery = await take(reader)
    assert await reader.claim(delivery) == ActionClaimed(1)
    assert await reader.claim(delivery) == ActionReclaimed(1, "t1")
    await store.connection.call("XADD", stream, "*", *fields)
    copy = await take(reader)
    assert await reader.claim(copy) == ActionReclaimed(1, "t1")
    assert await pending(store, stream, "tools") == 1
    await EventLog(store).append_observation(CID, output(2), worker_id="t1", place=copy.location)
    assert await pending(store, stream, "tools") == 0
    await reader.aclose()


async def test_a_claim_whose_reply_was_lost_is_still_a_claim(store: Store, connect: Callable[[], Connection]) -> None:
    await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    second = await enter(store, "t2", node="n1")
    await act(store, "w1")
    losing = await open_store(LosingConnection(connect(), every_first("FCALL")))
    first, heir = queue(losing, "t1", node="n1"), queue(losing, "t2", node="n1")
    assert await first.claim(await take(first)) == ActionReclaimed(1, "t1")
    await lapse(store, "t1")
    await second.beat(1)
    assert await heir.claim(await take(heir)) == ActionReclaimed(2, "t2")
    for reader in (first, heir):
        await reader.aclose()
    await losing.aclose()


async def test_actions_whose_delivery_was_lost_are_read_again(store: Store, connect: Callable[[], Connection]) -> None:
    log = await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    ownership = await claim(store, "w1")
    actions = [command(str(n)) for n in range(5)]
    await log.append_as_owner(ownership, actions, expected_last_id=1, dispatch=range(5))
    losing = await open_store(LosingConnection(connect(), first_only("XREADGROUP")))
    reader = queue(losing, "t1", node="n1")
    # What the lost reply delivered comes first, and is paged through; then what is new.
    found = [delivery.action_id for _ in range(4) for delivery in await reader.read(limit=2)]
    assert found == [2, 3, 4, 5, 6]
    await reader.aclose()
    await losing.aclose()


async def test_what_an_older_store_has_handed_out_is_read_again(
    store: Store, connect: Callable[[], Connection]
) -> None:
    """The reader was busy with its actions while the store was away, so it has seen no call fail."""
    await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    _, action_id = await act(store, "w1")
    reader, stream = queue(store, "t1", node="n1"), store.all_shards[0].actions("pool:bash")
    delivery = await take(reader)
    await reader.acknowledge(delivery)
    other = connect()
    (entry,) = await other.call("XRANGE", stream, "-", "+")
    await other.call("XADD", stream, "*", *entry[1])
    assert await other.call("XREADGROUP", "GROUP", "tools", "t1", "STREAMS", stream, ">")
    await reconnect(store, other)
    assert (await take(reader)).action_id == action_id
    await other.aclose()
    await reader.aclose()


async def test_a_missing_stream_hides_no_lost_delivery_of_another(
    store: Store, connect: Callable[[], Connection]
) -> None:
    await begin(store)
    await enter(store, "w1")
    tool = await enter(store, "t1", node="n1")
    _, action_id = await act(store, "w1")
    reader, names, other = queue(store, "t1", node="n1"), store.all_shards[0], connect()
    assert await other.call("XREADGROUP", "GROUP", "tools", "t1", "STREAMS", names.actions("pool:bash"), ">")
    await reconnect(store, other)
    await other.call("DEL", names.actions("node:n1"))
    assert await reader.read(limit=5) == []
    await tool.register()
    assert (await take(reader)).action_id == action_id
    await other.aclose()
    await reader.aclose()


async def reconnect(store: Store, other: Connection) -> None:
    """Let the store break every connection but one, and wait until its worker has noticed, as with the next beat."""
    connects = store.connection.connects
    if isinstance(other, MemoryConnection):
        other.server.restarts += 1
    else:
        await other.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    while store.connection.connects == connects:
        await store.retry(lambda: store.connection.call("EXISTS", "nothing"))


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_sessions_on_an_unserved_node_are_not_ended(store: Store, is_waiting: bool) -> None:
    await begin(store)
    names = store.keys(CID)
    await store.connection.call("HSET", names.meta, "node", "gone")
    stream = names.shard.actions("node:gone")
    if is_waiting:  # an order that nobody has taken
        await store.connection.call("XADD", stream, "*", "c", CID, "a", 0, "x", "cancel")
    assert not await WorkspaceOrders(store).end_sessions(CID, limit_seconds=0.1)
    await enter(store, "t1", node="gone")
    reader = queue(store, "t1", node="gone")
    orders = [delivery for delivery in await reader.read(limit=8) if isinstance(delivery, ControlDelivery)]
    assert [order.order for order in orders][-1] == "close"  # a worker of the node that comes later ends them
    await reader.aclose()


async def test_order_is_done_when_the_receiving_worker_did_it(store: Store) -> None:
    await begin(store)
    await enter(store, "w1")
    first, second = await enter(store, "t1", node="n1"), await enter(store, "t2", node="n1")
    await act(store, "w1")
    reader = queue(store, "t1", node="n1")
    await reader.claim(await take(reader))
    order = asyncio.create_task(WorkspaceOrders(store).end_sessions(CID, limit_seconds=20))
    (handed,) = await reader.read(limit=1)
    assert isinstance(handed, ControlDelivery)
    await lapse(store, "t1")
    assert await second.beat(1) is not None
    assert await first.beat(1) is None
    heir = queue(store, "t2", node="n1")
    (again,) = [delivery for delivery in await heir.read(limit=8) if isinstance(delivery, ControlDelivery)]
    assert again.location != handed.location
    done, _ = await asyncio.wait({order}, timeout=0.2)
    assert not done
    await heir.acknowledge(again)
    assert await order
    await reader.aclose()
    await heir.aclose()
