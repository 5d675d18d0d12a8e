"""Heartbeats, sweeps and burials: a dead worker's work returns, for every worker and after anything it does later."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from broker.contract.codec import checksum_of
from broker.contract.events import ConversationCreated, WorkspaceSpec
from broker.coordination.action_streams import ActionClaimed, ActionReclaimed, NothingToDo, list_routes
from broker.coordination.crash_attribution import Mark
from broker.coordination.membership import BEATS_PER_FACTS, Membership, list_members
from broker.coordination.ownership import ClaimedConversation, ClaimFailure, Owners
from broker.coordination.wakeups import ReadyStream
from broker.log.append_call import Appended, Fenced
from broker.log.conversations import Conversations
from broker.log.event_log import EventLog
from broker.store.store import Store
from broker.testing.manual_clock import ManualClock
from tests import broker_parts
from tests.broker_parts import CID, begin, bury, claim, dispatch_one, enter, message, output, own, take

TTL_MS = 3_600_000
Queue = Callable[..., Any]


async def claim_whole(store: Store, worker_id: str, conversation_id: str = CID) -> ClaimedConversation:
    claimed = await Owners(store).claim(conversation_id, worker_id)
    assert isinstance(claimed, ClaimedConversation)
    return claimed


async def pending(store: Store) -> int:
    return await broker_parts.pending(store, store.all_shards[0].actions("pool:bash"), "tools")


async def count_notified(store: Store) -> int:
    return len(await broker_parts.notified(store))


async def claim_all(store: Store, worker_id: str, ids: Iterable[str]) -> None:
    for cid in ids:
        await begin(store, cid)
        await claim(store, worker_id, cid)


async def test_members_are_shown(store: Store) -> None:
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    await broker_parts.lapse(store, "t1")
    found = await list_members(store)
    assert [(member.worker_id, member.role) for member in found] == [("t1", "tools"), ("w1", "controller")]
    assert found[0].left_seconds < 0 < found[1].left_seconds
    assert found[0].about["streams"] == "deck:{0}:act:node:n1 deck:{0}:act:pool:bash"


@pytest.mark.parametrize("deadline", ["inf", "-inf"])
async def test_a_deadline_that_never_comes_is_shown_as_a_number(store: Store, deadline: str) -> None:
    await store.connection.call("ZADD", store.all_shards[0].workers, deadline, "forged")
    (found,) = await list_members(store)
    assert math.isfinite(found.left_seconds)


async def test_foreign_writes_about_a_living_worker_last_few_beats(store: Store) -> None:
    """They would hold up what is sent to the node: a submission looks for a worker that serves it."""
    said = {"node": "n1", "pools": "bash", "workspace_roots": "/srv", "offer": "{}"}
    stream = store.all_shards[0].actions("pool:bash")
    worker = Membership(store, "t1", "tool", streams=[[stream]], about=said, ttl_seconds=3_600.0)
    await worker.register()
    about = store.all_shards[0].worker_facts("t1")
    forged = {**dict.fromkeys(said, "forged"), "role": "controller", "streams": f"{stream}x"}
    added = {"agents": "", "interactive": "1", "end": "leave"}
    await store.connection.call("HSET", about, *[part for item in (forged | added).items() for part in item])
    await store.connection.call("HDEL", about, "offer")
    for beat in range(BEATS_PER_FACTS):
        assert await worker.beat(beat) is not None
    (found,) = await list_members(store)
    assert {name: found.about.get(name) for name in forged} == {**said, "role": "tool", "streams": stream}
    assert not added.keys() & found.about.keys()
    assert {"since_ms", "ttl_ms", "beat_ms", "progress"} <= found.about.keys()


async def test_a_dead_controllers_conversations_are_taken_over(store: Store) -> None:
    await own(store)
    second = await enter(store, "w2")
    before = await count_notified(store)
    assert await bury(store, "w1", by=second) == 1
    assert await count_notified(store) == before + 1
    claimed = await claim_whole(store, "w2")
    assert claimed.crashes == 1
    (takeover,) = await Conversations(store).list_takeovers()
    assert (takeover.conversation_id, takeover.action_id) == (CID, None)
    assert (takeover.from_worker, takeover.to_worker) == ("w1", "w2")
    await Owners(store).release(claimed.ownership, seen_id=1)
    await claim(store, "w2")
    assert await Conversations(store).list_takeovers() == [takeover]  # the next owner takes over from no other
    assert [member.worker_id for member in await list_members(store)] == ["w2"]


async def test_deliveries_to_a_dead_controller_return(store: Store, closing: Callable[[Any], Any]) -> None:
    names = store.all_shards[0]
    await enter(store, "w2")
    await enter(store, "w1")
    await begin(store)
    lost, heir = (closing(ReadyStream(store, names, worker)) for worker in ("w1", "w2"))
    assert [cid for cid, _ in await lost.read(limit=1)] == [CID]
    await bury(store, "w1")
    ((cid, entry),) = await heir.read(limit=1)
    assert isinstance(await Owners(store).claim(cid, "w2", ready_entry=entry), ClaimedConversation)
    assert await broker_parts.pending(store, names.ready, "controllers") == 0


async def test_a_zombie_finds_out_at_its_next_beat(store: Store) -> None:
    log, ownership = await own(store)
    first = await enter(store, "w1")
    await bury(store, "w1")
    assert await first.beat(2) is None
    assert await log.append_as_owner(ownership, [message()], expected_last_id=1) == Fenced()
    assert await Owners(store).claim(CID, "w1") is ClaimFailure.SWEPT


async def test_a_started_burial_is_final(store: Store) -> None:
    first, second = await enter(store, "w1"), await enter(store, "w2")
    ids = [f"conversation-{n}" for n in range(300)]  # more than one beat hands back
    await claim_all(store, "w1", ids)
    assert await bury(store, "w1", by=second) == 0
    assert await first.beat(1) is None
    assert await Owners(store).claim(ids[0], "w1") is ClaimFailure.SWEPT
    assert (await second.beat(2)).removed_count == 1
    for cid in ids:
        await claim(store, "w2", cid)


async def test_a_burial_leaves_what_another_has_taken_over_before(store: Store) -> None:
    log, _ = await own(store)
    second = await enter(store, "w2")
    await store.connection.call("ZADD", store.all_shards[0].workers, 0, "w1")  # its burial has started
    ownership = await claim(store, "w2")
    assert (await second.beat(1)).removed_count == 1
    assert isinstance(await log.append_as_owner(ownership, [message()], expected_last_id=1), Appended)


async def test_a_notification_that_waits_is_put_off_and_not_repeated(store: Store) -> None:
    """Only so many are looked at with each beat: those that are in order must not keep later ones from it."""
    await begin(store)
    worker = await enter(store, "w1")
    key = f"{store.all_shards[0].root}:unread"
    await store.connection.call("ZADD", key, 1, CID)
    assert (await worker.beat(1)).notified_again == 0
    assert float(await store.connection.call("ZSCORE", key, CID)) > 1


@pytest.mark.parametrize("dies", [False, True], ids=["leaves", "dies while leaving"])
async def test_a_leaving_worker_hands_everything_back_without_a_crash(store: Store, dies: bool) -> None:
    first, second = await enter(store, "w1"), await enter(store, "w2")
    ids = [f"conversation-{n}" for n in range(1_010)]  # more than one call hands back
    await claim_all(store, "w1", ids)
    if dies:
        await store.call_function("deck_leave", (store.all_shards[0].root,), "w1")  # the first thousand
        await second.beat(1)
    else:
        await first.leave()
        await first.leave()
    for cid in ids:
        assert (await claim_whole(store, "w2", cid)).crashes == 0
    if not dies:
        assert await Conversations(store).list_takeovers() == []
        assert [member.worker_id for member in await list_members(store)] == ["w2"]


async def test_a_conversation_that_kills_three_workers_is_a_dead_letter(store: Store) -> None:
    await begin(store, "poison")
    await begin(store, "innocent")
    last = await enter(store, "last")
    crashes = []
    for n in range(3):
        await enter(store, f"w{n}")
        assert await Owners(store).mark(await claim(store, f"w{n}", "poison"), Mark.ACTING)
        await claim(store, f"w{n}", "innocent")
        await bury(store, f"w{n}", by=last)
        crashes.append(await Conversations(store).list_dead_letters())
    assert crashes == [[], [], ["poison"]]
    assert (await claim_whole(store, "last", "poison")).crashes == 3
    assert (await claim_whole(store, "last", "innocent")).crashes == 1


async def test_deaths_between_two_waits_for_others_do_not_add_up(store: Store) -> None:
    await begin(store)
    last = await enter(store, "last")
    for n in range(6):
        await enter(store, f"w{n}")
        claimed = await claim_whole(store, f"w{n}")
        assert claimed.crashes < 3
        assert await Owners(store).mark(claimed.ownership, Mark.ACTING)
        if n % 2:
            assert await Owners(store).mark(claimed.ownership, Mark.ACQUITTED)
        await bury(store, f"w{n}", by=last)
    assert await Conversations(store).list_dead_letters() == []


async def test_deaths_after_a_wait_for_others_add_up(store: Store) -> None:
    await begin(store)
    last = await enter(store, "last")
    for n in range(3):
        await enter(store, f"w{n}")
        claimed = await claim_whole(store, f"w{n}")
        assert claimed.crashes == n
        for mark in (Mark.ACTING, Mark.ACQUITTED, Mark.ACTING_AGAIN):
            assert await Owners(store).mark(claimed.ownership, mark)
        await bury(store, f"w{n}", by=last)
    assert (await claim_whole(store, "last")).crashes == 3


@pytest.mark.parametrize("is_released", [True, False])
async def test_progress_forgives_deaths_after_a_wait(store: Store, is_released: bool) -> None:
    log, _ = await own(store)
    last = await enter(store, "last")
    await bury(store, "w1", by=last)
    await enter(store, "w2")
    ownership = await claim(store, "w2")
    for mark in (Mark.ACTING, Mark.ACQUITTED, Mark.ACTING_AGAIN):
        assert await Owners(store).mark(ownership, mark)
    await bury(store, "w2", by=last)
    ownership = await claim(store, "last")
    if is_released:
        assert await Owners(store).release(ownership, seen_id=1) is None
    else:
        await log.append_as_owner(ownership, [message()], expected_last_id=1)
        assert await Owners(store).release(ownership, seen_id=2) is None
    assert await store.call("HMGET", store.known_keys(CID).grants, "crashes", "late", "mark") == [None] * 3


async def test_a_conversation_that_gets_on_is_forgiven(store: Store) -> None:
    log, _ = await own(store)
    last = await enter(store, "last")
    await bury(store, "w1", by=last)
    claimed = await claim_whole(store, "last")
    assert claimed.crashes == 1
    assert await log.append_as_owner(claimed.ownership, [message()], expected_last_id=1) == Appended(2, 2)
    found = await Owners(store).resume_claim(CID, "last")
    assert found.crashes == 0


async def test_an_orderly_release_takes_the_crashes_away(store: Store) -> None:
    await own(store)
    last = await enter(store, "last")
    await bury(store, "w1", by=last)
    assert await Owners(store).release(await claim(store, "last"), seen_id=1) is None
    await enter(store, "w2")
    assert await Owners(store).mark(await claim(store, "w2"), Mark.ACTING)
    await bury(store, "w2", by=last)
    assert (await claim_whole(store, "last")).crashes == 1  # and not 2: it was released in order in between


async def test_a_dead_letter_gets_another_chance(store: Store) -> None:
    await begin(store)
    await store.connection.call("HSET", store.known_keys(CID).grants, "crashes", 3)
    await store.connection.call("ZADD", store.all_shards[0].dead, 1, CID)
    before = await count_notified(store)
    for _ in range(2):
        await Conversations(store).requeue(CID)
    assert await Conversations(store).list_dead_letters() == []
    assert await count_notified(store) == before + 2
    await enter(store, "w1")
    assert (await claim_whole(store, "w1")).crashes == 0


@pytest.mark.parametrize("how", ["written to", "closed"])
async def test_a_conversation_is_a_dead_letter_until_it_is(store: Store, how: str) -> None:
    log, conversations = await begin(store), Conversations(store)
    await store.connection.call("ZADD", store.all_shards[0].dead, 1, CID)
    if how == "closed":
        await conversations.close(CID)
    else:
        await log.append(CID, [message()])
    assert await conversations.list_dead_letters() == []


async def test_deliveries_to_a_dead_tool_worker_return(store: Store, queue: Queue) -> None:
    await dispatch_one(store, t1="n1", t2="n1")
    first, heir = queue("t1"), queue("t2")
    delivery = await take(first)
    assert await first.claim(delivery) == ActionClaimed(1)
    await bury(store, "t1")
    again = await take(heir)
    assert (again.action_id, again.entry, again.workspace) == (2, delivery.entry, delivery.workspace)
    assert await heir.claim(again) == ActionReclaimed(2, "t1")
    (takeover,) = await Conversations(store).list_takeovers()
    assert (takeover.action_id, takeover.from_worker, takeover.to_worker) == (2, "t1", "t2")


async def test_a_buried_tool_worker_claims_nothing(store: Store, queue: Queue) -> None:
    await dispatch_one(store, t1="n1", t2="n2")
    first, heir = queue("t1"), queue("t2", "n2")
    delivery = await take(first)
    await bury(store, "t1")
    assert await first.claim(delivery) == NothingToDo("swept")
    assert await heir.claim(await take(heir)) == ActionClaimed(1)


async def test_zombie_that_reads_does_not_keep_its_entries(store: Store, queue: Queue) -> None:
    """A server keeps serving the blocked read of a process that is stopped."""
    log, ownership = await own(store)
    await enter(store, "t1", node="n1")
    second = await enter(store, "t2", node="n2")
    await bury(store, "t1", by=second)
    await log.append_as_owner(ownership, [broker_parts.command()], expected_last_id=1, dispatch=[0])
    heir = queue("t2", "n2")
    await take(queue("t1"))
    await second.beat(2)
    assert await heir.claim(await take(heir)) == ActionClaimed(1)
    assert await pending(store) == 1


async def test_settled_work_is_not_delivered_again(store: Store, queue: Queue) -> None:
    log, ownership = await dispatch_one(store, t1="n1")
    first = queue("t1")
    await first.claim(await take(first))
    await log.append_as_owner(ownership, [output(2)], expected_last_id=2, answers={0: 2})
    await bury(store, "t1")
    assert await pending(store) == 0
    checksum = checksum_of(await log.load_entry(CID, 2)).encode()
    left = await store.connection.call("HGETALL", store.known_keys(CID).once)
    assert left == [b"create:begin", b"1:1", b"o:2", b"3:3:" + checksum]


async def test_the_second_copy_of_an_action_dies_with_its_holder(store: Store, queue: Queue) -> None:
    """A dead worker's copy of an action never takes the place of the copy that a live worker runs."""
    await dispatch_one(store, t1="n1", t2="n1", t3="n1")
    await broker_parts.copy_entry(store)
    first, second, heir = (queue(worker) for worker in ("t1", "t2", "t3"))
    assert len(await first.read(limit=1)) == 1
    (copy,) = await second.read(limit=1)
    assert await second.claim(copy) == ActionClaimed(1)
    await bury(store, "t1")
    assert await pending(store) == 1
    await bury(store, "t2")
    assert await heir.claim(await take(heir)) == ActionReclaimed(2, "t2")


async def test_last_copy_returns_even_if_another_should_carry_it(store: Store, queue: Queue) -> None:
    await dispatch_one(store, t1="n1", t2="n1")
    copied = await broker_parts.copy_entry(store)
    location = f"{store.all_shards[0].actions('pool:bash')}|{copied.decode()}"
    await store.connection.call("HSET", store.known_keys(CID).once, "q:2", location)
    first, heir = queue("t1"), queue("t2")
    deliveries = await first.read(limit=5)
    await first.acknowledge(deliveries[1])  # as a second copy of the current work
    await bury(store, "t1")
    assert await heir.claim(await take(heir)) == ActionClaimed(1)


async def test_ring_to_a_dead_worker_is_repeated_for_all(store: Store) -> None:
    log, _ = await own(store)
    await log.append(CID, [message()])  # rings the mailbox of w1
    before = await count_notified(store)
    await bury(store, "w1")
    assert await count_notified(store) == before + 1


async def test_orders_of_a_dead_worker_come_back_too(store: Store, queue: Queue) -> None:
    log, ownership = await dispatch_one(store, t1="n1", t2="n1")
    first, heir = queue("t1"), queue("t2")
    await first.claim(await take(first))
    await log.append_as_owner(ownership, [broker_parts.command("wait")], expected_last_id=2, cancels=[2])
    (order,) = await first.read(limit=5)
    await bury(store, "t1")
    (again,) = [item for item in await heir.read(limit=5) if hasattr(item, "order")]
    assert (again.action_id, again.order) == (2, "cancel")
    assert order.location != again.location


async def test_deadline_from_a_reset_clock_is_not_believed(store: Store) -> None:
    names = store.all_shards[0]
    first = await enter(store, "w1")
    await enter(store, "w2")
    await store.connection.call("ZADD", names.workers, 9_999_999_999_999, "w2")
    await first.beat(1)
    deadline = float(await store.connection.call("ZSCORE", names.workers, "w2"))
    assert deadline <= store.clock.now().timestamp() * 1000 + 3_600_000 + 60_000


async def test_the_time_of_a_shard_never_runs_back(store: Store) -> None:
    names = store.all_shards[0]
    await enter(store, "w1")
    before = (await store.call_function("deck_tick", (names.root,), "w1", TTL_MS, 1, 0))[-1]
    ahead = before + TTL_MS // 2
    await store.connection.call("HSET", f"{names.root}:clock", "wall", ahead, "now", ahead)
    assert (await store.call_function("deck_tick", (names.root,), "w1", TTL_MS, 2, 0))[-1] >= ahead


async def test_a_time_without_any_beats_buries_no_worker(memory_store: Store, clock: ManualClock) -> None:
    names = memory_store.all_shards[0]

    async def tick(worker: str) -> list[Any]:
        monotonic_ms = int(clock.monotonic() * 1000)
        return list(await memory_store.call_function("deck_tick", (names.root,), worker, 3_000, 1, 0, monotonic_ms))

    for worker in ("w1", "w2"):
        await enter(memory_store, worker)
        await tick(worker)
    clock.advance(10)
    assert (await tick("w1"))[:2] == ["alive", 0]
    assert (await tick("w2"))[0] == "alive"
    for buried in (0, 0, 1):
        clock.advance(1)
        assert (await tick("w1"))[1] == buried


async def test_a_stream_that_lost_its_group_gets_it_back(store: Store, queue: Queue) -> None:
    names = store.all_shards[0]
    worker = await enter(store, "t1", node="n1")
    await store.connection.call("DEL", names.actions("pool:bash"), names.ready)
    await begin(store)
    await enter(store, "w1")
    await store.connection.call("DEL", names.ready)
    await broker_parts.act(store, "w1")
    await worker.beat(1)
    reader = queue("t1")
    assert await reader.claim(await take(reader)) == ActionClaimed(1)
    (group,) = await store.connection.call("XINFO", "GROUPS", names.ready)
    assert group[1] == b"controllers"


async def test_a_stream_without_its_group_does_not_stop_a_burial(store: Store) -> None:
    stream = store.all_shards[0].actions("pool:bash")
    await enter(store, "t1", node="n1")
    await store.connection.call("DEL", stream)
    await store.connection.call("XADD", stream, "*", "c", CID, "a", "2", "x", "cancel")
    assert await bury(store, "t1") == 1


async def give_up(store: Store, node: str) -> None:
    """Let a node have been silent for longer than it may."""
    await store.connection.call("ZADD", store.all_shards[0].nodes, 1, node)


async def beat_from_n2(store: Store) -> None:
    """Let a tool worker of another node look after lost nodes with some beats."""
    shard = store.known_keys(CID).shard
    streams = [[shard.actions(route) for route in list_routes("n2", ["bash"])]]
    membership = Membership(store, "t2", "tools", streams=streams, about={"node": "n2"}, ttl_seconds=3600.0)
    await membership.register()
    for beat in range(3):
        await membership.beat(beat)


async def test_an_action_of_a_lost_node_goes_to_its_pool(store: Store, queue: Queue) -> None:
    await dispatch_one(store, t1="n1")
    other = await enter(store, "t2", node="n2")
    first, second = queue("t1"), queue("t2", "n2")
    assert await first.claim(await take(first)) == ActionClaimed(1)
    await bury(store, "t1", by=other)
    assert await broker_parts.node_of(store) == b"n1"  # it may come back
    await give_up(store, "n1")
    await other.beat(2)
    assert await second.claim(await take(second)) == ActionReclaimed(2, "t1", moves=1)
    assert await broker_parts.node_of(store) == b"n2"
    await other.beat(3)
    assert await second.read(limit=10) == []  # once


@pytest.mark.parametrize("many", ["nodes", "orders"])
async def test_many_lost_nodes_or_orders_block_no_action(store: Store, queue: Queue, many: str) -> None:
    log, ownership = await own(store)
    await enter(store, "t1", node="n1")
    shard = store.known_keys(CID).shard
    await store.connection.call("HSET", store.known_keys(CID).meta, "node", "n1")
    for n in range(130 if many == "nodes" else 0):
        await give_up(store, f"gone-{n}")
    for _ in range(1_000 if many == "orders" else 0):
        await store.connection.call("XADD", shard.actions("node:n1"), "*", "c", CID, "a", 0, "x", "close")
    await log.append_as_owner(ownership, [broker_parts.command()], expected_last_id=1, dispatch=[0])
    await broker_parts.lapse(store, "t1")
    await store.connection.call("ZADD", shard.nodes, 2, "n1")
    await beat_from_n2(store)
    second = queue("t2", "n2")
    assert await second.claim(await take(second)) == ActionClaimed(1, moves=1)
    assert await store.connection.call("EXISTS", shard.actions("node:n1")) == 0


async def test_a_later_action_does_not_wait_for_a_lost_node(store: Store, queue: Queue) -> None:
    log, ownership = await dispatch_one(store, t1="n1", t2="n2")
    first, second = queue("t1"), queue("t2", "n2")
    delivery = await take(first)
    await first.claim(delivery)
    await log.append_observation(CID, output(2), worker_id="t1", place=delivery.location)
    await give_up(store, "n1")
    assert await log.append_as_owner(ownership, [broker_parts.command()], expected_last_id=3, dispatch=[0]) == Appended(
        4, 4
    )
    assert await second.claim(await take(second)) == ActionClaimed(1, moves=1)


async def test_a_named_directory_stays_where_it_is(store: Store) -> None:
    workspace = WorkspaceSpec(path="/srv/project")
    await EventLog(store).create(ConversationCreated(conversation_id=CID, workspace=workspace), node="n1")
    await enter(store, "w1")
    other = await enter(store, "t2", node="n2")
    await give_up(store, "n1")
    await broker_parts.act(store, "w1")
    await other.beat(1)
    assert await broker_parts.node_of(store) == b"n1"
