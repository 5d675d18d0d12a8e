"""A node that is given up: its conversations continue at another, unless they work in a directory that only it has."""

from __future__ import annotations

from broker.contract.events import ConversationCreated, WorkspaceSpec
from broker.coordination.action_streams import ActionClaimed, ActionReclaimed, list_routes
from broker.coordination.membership import Membership
from broker.log.append_call import Appended
from broker.log.event_log import EventLog
from broker.store.store import Store
from tests.broker_parts import CID, act, begin, command, enter, lapse, output, queue, take


async def give_up(store: Store, node: str) -> None:
    """Let a node have been silent for longer than it may."""
    for shard in store.all_shards:
        await store.connection.call("ZADD", shard.nodes, 1, node)


async def sweeper(store: Store) -> Membership:
    """Register a tool worker whose beats look after lost nodes."""
    shard = store.keys(CID).shard
    streams = [[shard.actions(route) for route in list_routes("n2", ["bash"])]]
    membership = Membership(store, "t2", "tools", streams=streams, about={"node": "n2"}, ttl_seconds=3600.0)
    await membership.register()
    return membership


async def node_of(store: Store) -> bytes | None:
    return await store.connection.call("HGET", store.keys(CID).meta, "node")


async def test_an_action_of_a_lost_node_goes_to_its_pool(store: Store) -> None:
    await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    other = await enter(store, "t2", node="n2")
    await act(store, "w1")
    first = queue(store, "t1", node="n1")
    assert await first.claim(await take(first)) == ActionClaimed(1)
    await lapse(store, "t1")
    await other.beat(1)
    assert await node_of(store) == b"n1"  # it may come back
    await give_up(store, "n1")
    await other.beat(2)
    second = queue(store, "t2", node="n2")
    assert await second.claim(await take(second)) == ActionReclaimed(2, "t1", moves=1)
    assert await node_of(store) == b"n2"
    await other.beat(3)
    assert await second.read(limit=10) == []  # once
    await first.aclose()
    await second.aclose()


async def test_many_lost_nodes_block_none_from_being_left(store: Store) -> None:
    await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    other = await sweeper(store)
    await store.connection.call("HSET", store.keys(CID).meta, "node", "n1")
    await act(store, "w1")
    await lapse(store, "t1")
    shard = store.keys(CID).shard
    for n in range(130):
        await store.connection.call("ZADD", shard.nodes, 1, f"gone-{n}")
    await store.connection.call("ZADD", shard.nodes, 2, "n1")
    for beat in range(3):
        await other.beat(beat)
    second = queue(store, "t2", node="n2")
    assert await second.claim(await take(second)) == ActionClaimed(1, moves=1)
    await second.aclose()


async def test_orders_for_a_lost_node_do_not_pile_up(store: Store) -> None:
    await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    other = await sweeper(store)
    shard = store.keys(CID).shard
    for _ in range(1_000):
        await store.connection.call("XADD", shard.actions("node:n1"), "*", "c", CID, "a", 0, "x", "close")
    await store.connection.call("HSET", store.keys(CID).meta, "node", "n1")
    await act(store, "w1")
    await give_up(store, "n1")
    for beat in range(3):
        await other.beat(beat)
    second = queue(store, "t2", node="n2")
    assert await second.claim(await take(second)) == ActionClaimed(1, moves=1)
    assert await store.connection.call("EXISTS", shard.actions("node:n1")) == 0
    await second.aclose()


async def test_a_later_action_does_not_wait_for_a_lost_node(store: Store) -> None:
    log = await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    await enter(store, "t2", node="n2")
    ownership, action_id = await act(store, "w1")
    first = queue(store, "t1", node="n1")
    delivery = await take(first)
    await first.claim(delivery)
    await log.append_observation(CID, output(action_id), worker_id="t1", place=delivery.location)
    await give_up(store, "n1")
    appended = await log.append_as_owner(ownership, [command()], expected_last_id=action_id + 1, dispatch=[0])
    assert isinstance(appended, Appended)
    second = queue(store, "t2", node="n2")
    assert await second.claim(await take(second)) == ActionClaimed(1, moves=1)
    await first.aclose()
    await second.aclose()


async def test_a_directory_of_somebody_stays_where_it_is(store: Store) -> None:
    log = EventLog(store)
    workspace = WorkspaceSpec(path="/srv/project")
    await log.create(ConversationCreated(conversation_id=CID, workspace=workspace), node="n1")
    await enter(store, "w1")
    other = await enter(store, "t2", node="n2")
    await give_up(store, "n1")
    await act(store, "w1")
    await other.beat(1)
    assert await node_of(store) == b"n1"
