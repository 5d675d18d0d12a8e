"""Turns: the order of waiting work when capacity is scarce. Orders and shares are counted, no clock is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import pytest

from broker.contract.events import ConversationCreated
from broker.contract.specs import PriorityName, Tenancy
from broker.coordination.action_streams import ActionClaimed, ActionQueue, list_routes
from broker.coordination.membership import Membership
from broker.coordination.ownership import ClaimedConversation, DispatchOutcome, Owners
from broker.coordination.wakeups import ReadyStream
from broker.limits.tenants import TenantTable, publish_tenants
from broker.log.append_call import Appended
from broker.log.conversations import Conversations
from broker.log.deletion import Deletion
from broker.log.event_log import EventLog
from broker.store.store import Store
from tests.broker_parts import KEPT_TENANTS, claim, command, enter, lapse, make_up_tenants, output, pending

CONTROLLER, TOOL = "controller-1", "tool-1"
WEIGHTS = "tenants = {acme = 3, globex = 1}"
NODE = "n1"


@pytest.fixture
async def controller(store: Store) -> Membership:
    """Return the membership of a controller that reads interactive conversations too."""
    return await controllers(store)


async def controllers(store: Store, worker_id: str = CONTROLLER) -> Membership:
    about = {"interactive": "1"}
    membership = Membership(store, worker_id, "controller", about=about, ttl_seconds=3600.0)
    await membership.register()
    return membership


async def start(store: Store, conversation_id: str, *, priority: PriorityName = "batch", tenant: str = "") -> None:
    tenancy = Tenancy(priority=priority, tenant=tenant)
    created = ConversationCreated(conversation_id=conversation_id, tenancy=tenancy)
    assert isinstance(await EventLog(store).create(created, key="begin"), Appended)


async def start_all(store: Store, ids: Iterable[str], *, priority: PriorityName = "batch") -> None:
    """Start conversations whose tenants are the first parts of their names."""
    for cid in ids:
        await start(store, cid, priority=priority, tenant=cid.partition("-")[0])


def numbered(name: str, count: int) -> list[str]:
    return [f"{name}-{n}" for n in range(count)]


async def tools(store: Store, worker_id: str = TOOL, *, node: str = NODE) -> list[ActionQueue]:
    """Register a tool worker; return its actions of interactive conversations, and of all others."""
    shard, lanes = store.all_shards[0], (True, False)
    streams = [shard.actions(route, is_interactive=lane) for lane in lanes for route in list_routes(node, ["bash"])]
    about = {"node": node}
    await Membership(store, worker_id, "tool", streams=[streams], about=about, ttl_seconds=3600.0).register()
    return [ActionQueue(store, shard, worker_id=worker_id, node=node, pools=["bash"], is_first=lane) for lane in lanes]


async def taken(store: Store, count: int, *, worker_id: str = CONTROLLER, is_interactive: bool = False) -> list[str]:
    """Claim so many conversations one by one, and return them in the order in which they came."""
    stream = ReadyStream(store, store.all_shards[0], worker_id, is_interactive=is_interactive)
    found = []
    while len(found) < count:
        notified = await stream.read(limit=1)
        assert notified, found
        for cid, entry in notified:
            assert isinstance(await Owners(store).claim(cid, worker_id, ready_entry=entry), ClaimedConversation)
            found.append(cid)
    await stream.aclose()
    return found


async def act(store: Store, conversation_ids: Iterable[str]) -> dict[str, int]:
    """Append one runnable action to each conversation, as its owner; return their ids."""
    log, found = EventLog(store), {}
    for cid in conversation_ids:
        last, ownership = await log.load_last_id(cid), await claim(store, CONTROLLER, cid)
        outcome = await log.append_as_owner(ownership, [command(cid)], expected_last_id=last, dispatch=[0])
        assert isinstance(outcome, Appended)
        found[cid] = outcome.last_id
    return found


async def act_in_lines(store: Store, later: Iterable[str], first: Iterable[str]) -> ActionQueue:
    """Let started conversations act: those at the node, as after their first action, then those that have no node."""
    _, queue = await tools(store)
    for cid in later:
        await store.connection.call("HSET", store.known_keys(cid).meta, "node", NODE)
    await act(store, later)
    await act(store, first)
    return queue


async def performed(store: Store, queue: ActionQueue, count: int) -> list[str]:
    """Carry so many actions out one by one, and return their conversations in the order in which they came."""
    found: list[str] = []
    while len(found) < count:
        deliveries = await queue.read(limit=1)
        assert deliveries, found
        for delivery in deliveries:
            assert isinstance(await queue.claim(delivery), ActionClaimed)
            cid, observation = delivery.conversation_id, output(delivery.action_id)
            await EventLog(store).append_observation(cid, observation, worker_id=TOOL, place=delivery.location)
            found.append(cid)
    await queue.aclose()
    return found


def tenants_of(conversation_ids: Iterable[str]) -> Counter[str]:
    return Counter(cid.partition("-")[0] for cid in conversation_ids)


@pytest.mark.usefixtures("controller")
async def test_an_interactive_conversation_waits_for_no_batch(store: Store) -> None:
    await start_all(store, numbered("batch", 40))
    await start(store, "person", priority="interactive")
    assert await taken(store, 1, is_interactive=True) == ["person"]
    assert len(await taken(store, 40)) == 40


async def test_action_without_a_stream_reader_goes_to_all(store: Store) -> None:
    """A controller says whether it reads the interactive one."""
    await enter(store, CONTROLLER)
    await start(store, "person", priority="interactive")
    assert await taken(store, 1) == ["person"]


@pytest.mark.usefixtures("controller")
async def test_conversations_of_tenants_come_by_weight(store: Store) -> None:
    await publish_tenants(store, TenantTable.load_setting(WEIGHTS), None)
    await start_all(store, [f"{tenant}-{n}" for n in range(100) for tenant in ("globex", "acme")])
    assert tenants_of((await taken(store, 108))[8:]) == {"acme": 75, "globex": 25}


@pytest.mark.usefixtures("controller")
async def test_late_tenant_has_no_turns_to_make_up(store: Store) -> None:
    await start_all(store, numbered("early", 60))
    await taken(store, 30)
    await start_all(store, numbered("late", 20))
    assert tenants_of((await taken(store, 28))[8:]) == {"early": 10, "late": 10}


@pytest.mark.usefixtures("controller")
async def test_one_that_is_notified_again_in_line_keeps_its_place(store: Store) -> None:
    ids = numbered("batch", 16)
    await start_all(store, ids)
    await Conversations(store).requeue("batch-8")  # the first in line
    assert await taken(store, len(ids)) == ids


@pytest.mark.usefixtures("controller")
@pytest.mark.parametrize(("tenants", "shares"), [(WEIGHTS, 0.75), ("", 0.5)])
async def test_actions_of_tenants_come_by_weight(store: Store, tenants: str, shares: float) -> None:
    await publish_tenants(store, TenantTable.load_setting(tenants), None)
    ids = [f"{tenant}-{n}" for n in range(60) for tenant in ("globex", "acme")]
    await start_all(store, ids)
    # The node's stream and the pool's: every action went to the pool, and is bound to the node by its claim.
    found = tenants_of((await performed(store, await act_in_lines(store, [], ids), 72))[8:])
    assert abs(found["acme"] / 64 - shares) <= 0.02, found


@pytest.mark.usefixtures("controller")
async def test_tenants_share_a_node_by_weight_across_lines(store: Store) -> None:
    """All first actions, which wait in the pool's line, are the light tenant's."""
    await publish_tenants(store, TenantTable.load_setting(WEIGHTS), None)
    later, first = numbered("acme", 120), numbered("globex", 120)
    await start_all(store, [*later, *first])
    found = tenants_of((await performed(store, await act_in_lines(store, later, first), 116))[16:])
    assert abs(found["acme"] - 75) <= 3, found


@pytest.mark.usefixtures("controller")
async def test_normal_node_actions_precede_first_batch_actions(store: Store) -> None:
    later, first = numbered("normal", 120), numbered("batch", 120)
    for cid in later:
        await start(store, cid, priority="normal")
    for cid in first:
        await start(store, cid)
    found = tenants_of((await performed(store, await act_in_lines(store, later, first), 96))[16:])
    assert 8 <= found["batch"] <= 12, found


@pytest.mark.usefixtures("controller")
async def test_a_tenant_at_a_node_keeps_no_other_from_starting(store: Store) -> None:
    """Its first actions are before theirs in the pool's queue, and it has a long queue at the node."""
    later, first = numbered("acme", 120), [*numbered("acme-new", 60), *numbered("globex", 60)]
    await start_all(store, [*later, *first])
    found = tenants_of((await performed(store, await act_in_lines(store, later, first), 116))[16:])
    assert found["globex"] >= 33, found  # half, except each eighth turn and the actions already taken


@pytest.mark.usefixtures("controller")
async def test_tenant_with_a_node_line_still_starts_conversations(store: Store) -> None:
    later, new = numbered("acme", 120), numbered("acme-new", 40)
    await start_all(store, [*later, *new])
    found = (await performed(store, await act_in_lines(store, later, new), 96))[16:]
    assert sum(cid.startswith("acme-new") for cid in found) >= 8


@pytest.mark.usefixtures("controller")
async def test_pool_actions_come_once_its_nodes_have_no_line(store: Store) -> None:
    later, first = numbered("acme", 30), numbered("globex", 30)
    await start_all(store, [*later, *first])
    found = await performed(store, await act_in_lines(store, later, first), 60)
    assert sorted(found) == sorted((*later, *first))


@pytest.mark.usefixtures("controller")
async def test_normal_precedes_batch_and_each_eighth_turn_is_batch(store: Store) -> None:
    for cid in numbered("batch", 40):
        await start(store, cid)
    for cid in numbered("normal", 40):
        await start(store, cid, priority="normal")
    found = (await taken(store, 8 + 32))[8:]
    assert tenants_of(found) == {"normal": 28, "batch": 4}
    gaps = [n for n, cid in enumerate(found) if cid.startswith("batch")]
    assert {after - before for before, after in pairwise(gaps)} == {8}


@pytest.mark.usefixtures("controller")
async def test_an_interactive_action_waits_for_no_batch(store: Store) -> None:
    first, others = await tools(store)
    ids = numbered("batch", 30)
    await start_all(store, ids)
    await act(store, ids)
    await start(store, "person", priority="interactive")
    await act(store, ["person"])
    assert await performed(store, first, 1) == ["person"]
    assert sorted(await performed(store, others, 30)) == sorted(ids)


@pytest.mark.usefixtures("controller")
async def test_an_action_in_line_is_queued_and_not_sent_again(store: Store) -> None:
    _, queue = await tools(store)
    ids = numbered("c", 12)
    await start_all(store, ids)
    actions = await act(store, ids)
    last = ids[-1]
    claimed = await Owners(store).resume_claim(last, CONTROLLER)
    entry = await EventLog(store).load_entry(last, actions[last])
    outcome = await Owners(store).dispatch(claimed.ownership, actions[last], entry)
    assert outcome is DispatchOutcome.QUEUED
    assert sorted(await performed(store, queue, 12)) == sorted(ids)
    assert await store.connection.call("XLEN", store.all_shards[0].actions("pool:bash")) == 12


async def test_conversations_in_line_are_notified_once(store: Store, controller: Membership) -> None:
    ids = numbered("c", 20)
    await start_all(store, ids)
    for _ in range(3):
        reply = await store.call_function("deck_tick", (store.all_shards[0].root,), CONTROLLER, 3_600_000, 1, 0)
        assert reply[3] == 0
    assert sorted(await taken(store, 20)) == sorted(ids)
    assert (await controller.beat(1)) is not None
    assert await pending(store, store.all_shards[0].ready, "controllers") == 0


async def test_a_beat_serves_the_line_of_a_dead_worker(store: Store) -> None:
    """It was handed the whole window, and none claims it: the others come with the next beats."""
    await controllers(store, "dying")
    await start_all(store, numbered("c", 20))
    stream = ReadyStream(store, store.all_shards[0], "dying")
    assert len(await stream.read(limit=20)) == 8
    await stream.aclose()
    other = await controllers(store)
    await other.beat(1)
    assert len(await taken(store, 12)) == 12
    await lapse(store, "dying")
    await other.beat(2)
    assert len(await taken(store, 8)) == 8


@pytest.mark.usefixtures("controller")
async def test_actions_for_a_lost_node_go_to_their_pool(store: Store) -> None:
    ids = numbered("c", 20)
    await start_all(store, ids)
    await (await act_in_lines(store, ids, [])).aclose()
    await store.connection.call("ZADD", store.all_shards[0].nodes, 1, NODE)
    await lapse(store, TOOL)
    _, rescuer = await tools(store, "tool-2", node="n2")
    for _ in range(3):
        await store.call_function("deck_tick", (store.all_shards[0].root,), "tool-2", 3_600_000, 1, 3_600_000)
    assert sorted(await performed(store, rescuer, 20)) == sorted(ids)
    left = store.all_shards[0].actions(f"node:{NODE}")
    for key in (left, *(left.replace(":act:", ":turns:act:") + end for end in ("", ":1", ":1:shares", ":2:shares"))):
        assert await store.connection.call("EXISTS", key) == 0, key


@pytest.mark.usefixtures("controller")
async def test_nothing_is_left_of_a_line_that_has_ended(store: Store) -> None:
    await start_all(store, numbered("c", 20))
    await taken(store, 20)
    root = store.all_shards[0].root
    for end in ("", ":0", ":1", ":2", ":1:shares", ":2:shares"):
        assert await store.connection.call("EXISTS", f"{root}:turns:ready{end}") == 0, end


async def test_deleted_conversations_leave_the_line(store: Store) -> None:
    """Where no controller works, none would ever take them out."""
    ids = numbered("c", 20)
    await start_all(store, ids)
    line = f"{store.all_shards[0].root}:turns:ready"
    assert await store.connection.call("ZCARD", f"{line}:2") > 5
    for cid in ids[:-1]:
        await Deletion(store).delete(cid, last_id=1)
    assert await store.connection.call("ZRANGE", f"{line}:2", 0, -1) == [ids[-1].encode()]
    await Deletion(store).delete(ids[-1], last_id=1)
    for end in ("", ":2", ":2:shares"):
        assert await store.connection.call("EXISTS", f"{line}{end}") == 0, end


async def test_a_large_window_is_counted_as_it_is(store: Store) -> None:
    """The server does not know the lag of a group where entries in the middle were removed."""
    for n in range(40):
        await controllers(store, f"controller-{n}")
    stream = store.all_shards[0].ready
    for n in range(90):
        await start(store, f"c-{n}")
        if n == 40:
            (middle, _), *_ = await store.connection.call("XREVRANGE", stream, "+", "-", "COUNT", 1)
            await start(store, "last")
            await store.connection.call("XDEL", stream, middle)
    assert await store.connection.call("XLEN", stream) == 80


@pytest.mark.usefixtures("controller")
async def test_a_lost_conversation_loses_its_turn_and_no_other(store: Store) -> None:
    for n in range(16):
        await start(store, f"c-{n:02}")
    for n in range(8, 12):
        await store.connection.call("DEL", store.known_keys(f"c-{n:02}").meta)
    await store.connection.call("SET", store.known_keys("c-12").meta, "damaged")
    assert await taken(store, 11) == [f"c-{n:02}" for n in (*range(8), *range(13, 16))]


@pytest.mark.usefixtures("controller")
async def test_appended_fields_change_neither_tenant_nor_priority(store: Store) -> None:
    """A tool worker, or an attacker in it, gains no priority by the fields that it appends."""
    await start(store, "one", tenant="acme")
    fields = {"class": "0", "tenant": "globex", "open_in": "globex", "title": "new"}
    await EventLog(store).append("one", [command()], fields=fields)
    claimed = await Owners(store).claim("one", CONTROLLER)
    assert (claimed.rank, claimed.share) == (2, "acme")
    assert await store.connection.call("HMGET", store.known_keys("one").meta, "title", "open_in") == [b"new", b"acme"]


@pytest.mark.usefixtures("controller")
async def test_made_up_tenants_share_one_share(store: Store) -> None:
    await publish_tenants(store, TenantTable.load_setting('tenants = {acme = 1, "*" = 1}'), None)
    for n in range(60):
        await start(store, f"acme-{n}", tenant="acme")
        await start(store, f"liar-{n}", tenant=f"liar-{n}")
    assert tenants_of((await taken(store, 68))[8:]) == {"acme": 30, "liar": 30}


@pytest.mark.usefixtures("controller")
async def test_the_line_of_a_busy_stream_forgets_made_up_tenants(store: Store) -> None:
    await start_all(store, numbered("a", 24))
    shares = f"{store.all_shards[0].root}:turns:ready:2:shares"
    await make_up_tenants(store, shares)
    await start_all(store, numbered("b", 24))
    assert await store.connection.call("HLEN", shares) <= KEPT_TENANTS + 3
    shared = tenants_of(await taken(store, 40))
    assert abs(shared["a"] - shared["b"]) <= 9  # eight of `a` were in the stream before the line
