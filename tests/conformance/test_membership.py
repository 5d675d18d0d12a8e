"""Heartbeats, sweeps and burials: what a worker had comes back, whichever worker it was and whatever it does afterwards."""

from __future__ import annotations

import math
from typing import Any

import pytest

from broker.coordination.action_streams import ActionClaimed, ActionReclaimed, NothingToDo
from broker.coordination.membership import BEATS_PER_FACTS, Membership, list_members
from broker.coordination.ownership import ClaimedConversation, ClaimFailure, Owners
from broker.coordination.wakeups import ReadyStream
from broker.log.append_call import Appended, Fenced
from broker.log.conversations import Conversations
from broker.store.store import Store
from broker.testing.manual_clock import ManualClock
from tests.broker_parts import (
    CID,
    act,
    begin,
    claim,
    command,
    enter,
    lapse,
    message,
    notified,
    output,
    pending,
    queue,
    take,
)

TTL_MS = 3_600_000


async def test_members_are_shown(store: Store) -> None:
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    await lapse(store, "t1")
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
    """It would hold up what is sent to the node: a submission looks for a worker that serves it."""
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
    await begin(store)
    await enter(store, "w1")
    await claim(store, "w1")
    second = await enter(store, "w2")
    before = len(await notified(store))
    await lapse(store, "w1")
    tick = await second.beat(1)
    assert tick is not None
    assert tick.removed_count == 1
    assert len(await notified(store)) == before + 1
    claimed = await Owners(store).claim(CID, "w2")
    assert isinstance(claimed, ClaimedConversation)
    assert claimed.crashes == 1
    (takeover,) = await Conversations(store).list_takeovers()
    assert (takeover.conversation_id, takeover.action_id, takeover.from_worker, takeover.to_worker) == (
        CID,
        None,
        "w1",
        "w2",
    )
    await Owners(store).release(claimed.ownership, seen_id=1)
    await claim(store, "w2")
    assert await Conversations(store).list_takeovers() == [takeover]  # the next owner takes over from nobody
    assert [member.worker_id for member in await list_members(store)] == ["w2"]


async def test_what_a_dead_controller_was_handed_comes_back(store: Store) -> None:
    names = store.all_shards[0]
    second = await enter(store, "w2")
    await enter(store, "w1")
    await begin(store)
    lost = ReadyStream(store, names, "w1")
    assert [cid for cid, _ in await lost.read(limit=1)] == [CID]
    await lapse(store, "w1")
    await second.beat(1)
    heir = ReadyStream(store, names, "w2")
    ((cid, entry),) = await heir.read(limit=1)
    assert isinstance(await Owners(store).claim(cid, "w2", ready_entry=entry), ClaimedConversation)
    assert await pending(store, names.ready, "controllers") == 0
    for stream in (lost, heir):
        await stream.aclose()


async def test_a_zombie_finds_out_at_its_next_beat(store: Store) -> None:
    log = await begin(store)
    first = await enter(store, "w1")
    second = await enter(store, "w2")
    ownership = await claim(store, "w1")
    await lapse(store, "w1")
    await second.beat(1)
    assert await first.beat(2) is None
    assert await log.append_as_owner(ownership, [message()], expected_last_id=1) == Fenced()
    assert await Owners(store).claim(CID, "w1") is ClaimFailure.SWEPT


async def test_a_burial_once_begun_is_final(store: Store) -> None:
    first = await enter(store, "w1")
    second = await enter(store, "w2")
    ids = [f"conversation-{n}" for n in range(300)]  # more than one beat hands back
    for cid in ids:
        await begin(store, cid)
        await claim(store, "w1", cid)
    await lapse(store, "w1")
    tick = await second.beat(1)
    assert tick is not None
    assert tick.removed_count == 0
    assert await first.beat(1) is None
    assert await Owners(store).claim(ids[0], "w1") is ClaimFailure.SWEPT
    tick = await second.beat(2)
    assert tick is not None
    assert tick.removed_count == 1
    for cid in ids:
        assert isinstance(await Owners(store).claim(cid, "w2"), ClaimedConversation)


async def test_a_burial_leaves_what_another_has_taken_over_before(store: Store) -> None:
    log = await begin(store)
    await enter(store, "w1")
    second = await enter(store, "w2")
    await claim(store, "w1")
    await store.connection.call("ZADD", store.all_shards[0].workers, 0, "w1")  # its burial has begun
    ownership = await claim(store, "w2")
    tick = await second.beat(1)
    assert tick is not None
    assert tick.removed_count == 1
    assert isinstance(await log.append_as_owner(ownership, [message()], expected_last_id=1), Appended)


async def test_a_notification_that_waits_is_put_off_and_not_repeated(store: Store) -> None:
    """Only so many are looked at with each beat: those that are in order must not keep later ones from it."""
    await begin(store)
    worker = await enter(store, "w1")
    key = f"{store.all_shards[0].root}:unread"
    await store.connection.call("ZADD", key, 1, CID)
    tick = await worker.beat(1)
    assert tick is not None
    assert tick.notified_again == 0
    assert float(await store.connection.call("ZSCORE", key, CID)) > 1


async def test_a_worker_that_leaves_hands_everything_back_without_a_crash(store: Store) -> None:
    first = await enter(store, "w1")
    await enter(store, "w2")
    ids = [f"conversation-{n}" for n in range(1_100)]  # more than one call hands back
    for cid in ids:
        await begin(store, cid)
    for cid in ids:
        await claim(store, "w1", cid)
    await first.leave()
    await first.leave()
    for cid in ids:
        claimed = await Owners(store).claim(cid, "w2")
        assert isinstance(claimed, ClaimedConversation)
        assert claimed.crashes == 0
    assert await Conversations(store).list_takeovers() == []
    assert [member.worker_id for member in await list_members(store)] == ["w2"]


async def test_worker_dying_while_leaving_counts_no_crash(store: Store) -> None:
    await enter(store, "w1")
    second = await enter(store, "w2")
    ids = [f"conversation-{n}" for n in range(1_010)]
    for cid in ids:
        await begin(store, cid)
        await claim(store, "w1", cid)
    await store.call_function("deck_leave", (store.all_shards[0].root,), "w1")  # the first thousand
    await second.beat(1)
    for cid in ids:
        claimed = await Owners(store).claim(cid, "w2")
        assert isinstance(claimed, ClaimedConversation)
        assert claimed.crashes == 0


async def test_a_conversation_that_kills_three_workers_is_a_dead_letter(store: Store) -> None:
    await begin(store, "poison")
    await begin(store, "innocent")
    owners = Owners(store)
    last = await enter(store, "last")
    crashes = []
    for n in range(3):
        await enter(store, f"w{n}")
        ownership = await claim(store, f"w{n}", "poison")
        assert await owners.mark(ownership, is_stepping=True)
        await claim(store, f"w{n}", "innocent")
        await lapse(store, f"w{n}")
        await last.beat(n)
        crashes.append(await Conversations(store).list_dead_letters())
    assert crashes == [[], [], ["poison"]]
    poison = await owners.claim("poison", "last")
    innocent = await owners.claim("innocent", "last")
    assert isinstance(poison, ClaimedConversation)
    assert isinstance(innocent, ClaimedConversation)
    assert (poison.crashes, innocent.crashes) == (3, 1)


async def test_a_conversation_that_gets_on_is_forgiven(store: Store) -> None:
    log = await begin(store)
    last = await enter(store, "last")
    await enter(store, "w1")
    await claim(store, "w1")
    await lapse(store, "w1")
    await last.beat(1)
    claimed = await Owners(store).claim(CID, "last")
    assert isinstance(claimed, ClaimedConversation)
    assert claimed.crashes == 1
    assert await log.append_as_owner(claimed.ownership, [message()], expected_last_id=1) == Appended(2, 2)
    found = await Owners(store).resume_claim(CID, "last")
    assert found is not None
    assert found.crashes == 0


async def test_an_orderly_release_takes_the_crashes_away(store: Store) -> None:
    await begin(store)
    last = await enter(store, "last")
    await enter(store, "w1")
    await claim(store, "w1")
    await lapse(store, "w1")
    await last.beat(1)
    assert await Owners(store).release(await claim(store, "last"), seen_id=1) is None
    await enter(store, "w2")
    assert await Owners(store).mark(await claim(store, "w2"), is_stepping=True)
    await lapse(store, "w2")
    await last.beat(2)
    claimed = await Owners(store).claim(CID, "last")
    assert isinstance(claimed, ClaimedConversation)
    assert claimed.crashes == 1  # and not 2: it was released in order in between


async def test_a_dead_letter_gets_another_chance(store: Store) -> None:
    await begin(store)
    names = store.all_shards[0]
    await store.connection.call("HSET", store.keys(CID).meta, "crashes", 3)
    await store.connection.call("ZADD", names.dead, 1, CID)
    before = len(await notified(store))
    conversations = Conversations(store)
    await conversations.requeue(CID)
    await conversations.requeue(CID)
    assert await conversations.list_dead_letters() == []
    assert len(await notified(store)) == before + 2
    await enter(store, "w1")
    claimed = await Owners(store).claim(CID, "w1")
    assert isinstance(claimed, ClaimedConversation)
    assert claimed.crashes == 0


@pytest.mark.parametrize("how", ["written to", "closed"])
async def test_a_conversation_is_a_dead_letter_until_it_is(store: Store, how: str) -> None:
    log, conversations = await begin(store), Conversations(store)
    await store.connection.call("ZADD", store.all_shards[0].dead, 1, CID)
    if how == "closed":
        await conversations.close(CID)
    else:
        await log.append(CID, [message()])
    assert await conversations.list_dead_letters() == []


async def test_what_a_dead_tool_worker_was_handed_comes_back(store: Store) -> None:
    await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    second = await enter(store, "t2", node="n1")
    await act(store, "w1")
    first, heir = queue(store, "t1", node="n1"), queue(store, "t2", node="n1")
    delivery = await take(first)
    assert await first.claim(delivery) == ActionClaimed(1)
    await lapse(store, "t1")
    await second.beat(1)
    again = await take(heir)
    assert (again.action_id, again.entry, again.workspace) == (2, delivery.entry, delivery.workspace)
    assert await heir.claim(again) == ActionReclaimed(2, "t1")
    (takeover,) = await Conversations(store).list_takeovers()
    assert (takeover.action_id, takeover.from_worker, takeover.to_worker) == (2, "t1", "t2")
    for reader in (first, heir):
        await reader.aclose()


async def test_a_buried_tool_worker_claims_nothing(store: Store) -> None:
    await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    second = await enter(store, "t2", node="n2")
    await act(store, "w1")
    first, heir = queue(store, "t1", node="n1"), queue(store, "t2", node="n2")
    delivery = await take(first)
    await lapse(store, "t1")
    await second.beat(1)
    assert await first.claim(delivery) == NothingToDo("swept")
    assert await heir.claim(await take(heir)) == ActionClaimed(1)
    for reader in (first, heir):
        await reader.aclose()


async def test_zombie_that_reads_does_not_keep_its_entries(store: Store) -> None:
    """A server keeps serving the blocked read of a process that is stopped."""
    await begin(store)
    names = store.all_shards[0]
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    second = await enter(store, "t2", node="n2")
    await lapse(store, "t1")
    await second.beat(1)
    await act(store, "w1")
    zombie, heir = queue(store, "t1", node="n1"), queue(store, "t2", node="n2")
    await take(zombie)
    await second.beat(2)
    assert await heir.claim(await take(heir)) == ActionClaimed(1)
    assert await pending(store, names.actions("pool:bash"), "tools") == 1
    for reader in (zombie, heir):
        await reader.aclose()


async def test_what_is_settled_is_not_handed_out_again(store: Store) -> None:
    log = await begin(store)
    names = store.all_shards[0]
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    second = await enter(store, "t2", node="n1")
    ownership, action_id = await act(store, "w1")
    first = queue(store, "t1", node="n1")
    await first.claim(await take(first))
    await log.append_as_owner(ownership, [output(action_id)], expected_last_id=2, answers={0: action_id})
    await lapse(store, "t1")
    await second.beat(1)
    assert await pending(store, names.actions("pool:bash"), "tools") == 0
    assert await store.connection.call("HGETALL", store.keys(CID).once) == [b"create:begin", b"1:1", b"o:2", b"3:3"]
    await first.aclose()


async def test_the_second_copy_of_an_action_dies_with_its_holder(store: Store) -> None:
    """A dead worker's copy of an action never takes the place of the copy that a live worker runs."""
    await begin(store)
    names = store.all_shards[0]
    await enter(store, "w1")
    for worker in ("t1", "t2"):
        await enter(store, worker, node="n1")
    third = await enter(store, "t3", node="n1")
    await act(store, "w1")
    stream = names.actions("pool:bash")
    ((_, fields),) = await store.connection.call("XRANGE", stream, "-", "+")
    await store.connection.call("XADD", stream, "*", *fields)
    first, second, heir = (queue(store, worker, node="n1") for worker in ("t1", "t2", "t3"))
    copies = await first.read(limit=1), await second.read(limit=1)
    assert [len(copy) for copy in copies] == [1, 1]
    assert await second.claim(copies[1][0]) == ActionClaimed(1)  # type: ignore[arg-type]
    await lapse(store, "t1")
    await third.beat(1)
    assert await pending(store, stream, "tools") == 1
    await lapse(store, "t2")
    await third.beat(2)
    assert await heir.claim(await take(heir)) == ActionReclaimed(2, "t2")
    for reader in (first, second, heir):
        await reader.aclose()


async def test_last_copy_returns_even_if_another_should_carry_it(store: Store) -> None:
    await begin(store)
    stream = store.all_shards[0].actions("pool:bash")
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    second = await enter(store, "t2", node="n1")
    await act(store, "w1")
    ((_, fields),) = await store.connection.call("XRANGE", stream, "-", "+")
    copy = await store.connection.call("XADD", stream, "*", *fields)
    await store.connection.call("HSET", store.keys(CID).once, "q:2", f"{stream}|{copy.decode()}")
    first, heir = queue(store, "t1", node="n1"), queue(store, "t2", node="n1")
    deliveries = await first.read(limit=5)
    await first.acknowledge(deliveries[1])  # as a second copy of what is in hand
    await lapse(store, "t1")
    await second.beat(1)
    assert await heir.claim(await take(heir)) == ActionClaimed(1)
    for reader in (first, heir):
        await reader.aclose()


async def test_ring_to_a_dead_worker_is_repeated_for_all(store: Store) -> None:
    log = await begin(store)
    await enter(store, "w1")
    second = await enter(store, "w2")
    await claim(store, "w1")
    await log.append(CID, [message()])  # rings the mailbox of w1
    before = len(await notified(store))
    await lapse(store, "w1")
    await second.beat(1)
    assert len(await notified(store)) == before + 1


async def test_orders_of_a_dead_worker_come_back_too(store: Store) -> None:
    log = await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    second = await enter(store, "t2", node="n1")
    ownership, action_id = await act(store, "w1")
    first, heir = queue(store, "t1", node="n1"), queue(store, "t2", node="n1")
    await first.claim(await take(first))
    await log.append_as_owner(ownership, [command("wait")], expected_last_id=2, cancels=[action_id])
    (order,) = await first.read(limit=5)
    await lapse(store, "t1")
    await second.beat(1)
    found = await heir.read(limit=5)
    orders = [item for item in found if hasattr(item, "order")]
    assert [(item.action_id, item.order) for item in orders] == [(2, "cancel")]
    assert order.location != orders[0].location
    for reader in (first, heir):
        await reader.aclose()


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


async def test_a_time_in_which_nobody_could_beat_buries_nobody(memory_store: Store, clock: ManualClock) -> None:
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


async def test_a_stream_that_lost_its_group_gets_it_back(store: Store) -> None:
    names = store.all_shards[0]
    worker = await enter(store, "t1", node="n1")
    stream = names.actions("pool:bash")
    await store.connection.call("DEL", stream, names.ready)
    await begin(store)
    await enter(store, "w1")
    await store.connection.call("DEL", names.ready)
    await act(store, "w1")
    await worker.beat(1)
    reader = queue(store, "t1", node="n1")
    assert await reader.claim(await take(reader)) == ActionClaimed(1)
    (group,) = await store.connection.call("XINFO", "GROUPS", names.ready)
    assert group[1] == b"controllers"
    await reader.aclose()


async def test_a_stream_without_its_group_does_not_stop_a_burial(store: Store) -> None:
    names = store.all_shards[0]
    await enter(store, "t1", node="n1")
    second = await enter(store, "w2")
    await store.connection.call("DEL", names.actions("pool:bash"))
    await store.connection.call("XADD", names.actions("pool:bash"), "*", "c", CID, "a", "2", "x", "cancel")
    await lapse(store, "t1")
    tick = await second.beat(1)
    assert tick is not None
    assert tick.removed_count == 1
