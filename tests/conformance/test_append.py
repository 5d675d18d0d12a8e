"""Appends and owners: outcomes, guards, ids without gaps; claims, releases and marks under one current token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import pytest

from broker.contract.actions import MessageAction
from broker.contract.events import ConversationCreated
from broker.contract.fencing import Ownership
from broker.contract.specs import Priority
from broker.coordination.crash_attribution import Mark
from broker.coordination.ownership import ClaimedConversation, ClaimFailure, Owners
from broker.log.append_call import Appended, Closed, Conflict, Duplicate, Fenced
from broker.log.conversations import Conversations
from broker.log.event_log import EventLog
from broker.runtime.clock import to_millis
from broker.runtime.errors import ConversationMoved, EventsLost, OwnershipLost, UnknownConversation, UsageError
from broker.store.connection import Argument, Connection
from broker.store.store import Store, open_store
from broker.testing.manual_clock import ManualClock
from tests import broker_parts
from tests.broker_parts import (
    CID,
    begin,
    bury,
    claim,
    command,
    dispatch_one,
    enter,
    mail_of,
    message,
    notified,
    output,
    own,
)


async def test_a_conversation_begins_at_event_1(store: Store) -> None:
    log = EventLog(store)
    created = ConversationCreated(conversation_id=CID, title="First")
    assert await log.create(created, [message("a"), message("b")], key="k") == Appended(1, 3)
    assert [event.id for event in await log.read(CID)] == [1, 2, 3]
    row = await Conversations(store).load_row(CID)
    assert (row.title, row.state, row.last_event_id, row.owner) == ("First", "loading", 3, "")


async def test_the_same_key_creates_once(store: Store) -> None:
    log = EventLog(store)
    created = ConversationCreated(conversation_id=CID)
    await log.create(created, [message()], key="k")
    await log.append(CID, [message("later")])
    assert await log.create(created, [message()], key="k") == Duplicate(1, 2)
    assert await log.load_last_id(CID) == 3


async def test_an_id_is_taken_once(store: Store) -> None:
    await begin(store)
    with pytest.raises(UsageError, match="There is a conversation with the id 'conversation-1' already"):
        await EventLog(store).create(ConversationCreated(conversation_id=CID), key="another")


async def test_a_producer_key_counts_once(store: Store) -> None:
    log = await begin(store)
    assert await log.append(CID, [message("a"), message("b")], key="k") == Appended(2, 3)
    assert await log.append(CID, [message("c")]) == Appended(4, 4)
    assert await log.append(CID, [message("a"), message("b")], key="k") == Duplicate(2, 3)
    assert await log.load_last_id(CID) == 4


async def test_producer_that_read_less_than_the_log_is_refused(store: Store) -> None:
    log = await begin(store)
    assert await log.append(CID, [message("a")], key="k", seen_id=1) == Appended(2, 2)
    for seen_id in (0, 1, 3):
        with pytest.raises(ConversationMoved, match="is at event 2"):
            await log.append(CID, [message("b")], key="other", seen_id=seen_id)
    assert await log.append(CID, [message("a")], key="k", seen_id=1) == Duplicate(2, 2)
    assert await log.append(CID, [message("b")], key="other", seen_id=2) == Appended(3, 3)


async def test_of_many_producers_that_have_seen_the_same_one_writes(store: Store) -> None:
    log = await begin(store)

    async def try_to_write(number: int) -> bool:
        try:
            await log.append(CID, [message(str(number))], seen_id=1)
        except ConversationMoved:
            return False
        return True

    assert sum(await asyncio.gather(*map(try_to_write, range(10)))) == 1
    assert await log.load_last_id(CID) == 2


async def test_nothing_is_appended_to_an_unknown_conversation(store: Store) -> None:
    log = EventLog(store)
    with pytest.raises(UnknownConversation):
        await log.append("nobody", [message()])
    with pytest.raises(UnknownConversation):
        await log.append_as_owner(Ownership("nobody", "w", "1"), [message()], expected_last_id=0)
    with pytest.raises(UnknownConversation):
        await log.append_observation("nobody", output(1), worker_id="w")
    assert await store.connection.call("EXISTS", store.known_keys("nobody").meta) == 0


async def test_a_closed_conversation_takes_nothing(store: Store) -> None:
    log, ownership = await own(store)
    await Conversations(store).close(CID)
    assert await log.append(CID, [message()]) == Closed()
    assert await log.append_observation(CID, output(1), worker_id="t1") == Closed()
    assert await log.append_as_owner(ownership, [message()], expected_last_id=1) == Closed()
    assert await log.load_last_id(CID) == 1


async def test_an_earlier_or_stolen_token_is_fenced(store: Store) -> None:
    log, old = await own(store)
    assert await log.append_as_owner(Ownership(CID, "w2", old.token), [message()], expected_last_id=1) == Fenced()
    await enter(store, "w2")
    await bury(store, "w1")
    new = await claim(store, "w2")
    assert await log.append_as_owner(old, [message("zombie")], expected_last_id=1) == Fenced()
    assert await log.append_as_owner(new, [message("heir")], expected_last_id=1) == Appended(2, 2)
    assert await log.append_as_owner(old, [message("zombie")], expected_last_id=2) == Fenced()
    assert await log.load_last_id(CID) == 2


async def test_an_outdated_decision_is_a_conflict(store: Store) -> None:
    log, ownership = await own(store)
    await log.append(CID, [message("wait")])
    assert await log.append_as_owner(ownership, [message()], expected_last_id=1) == Conflict(2)
    assert await log.append_as_owner(ownership, [message()], expected_last_id=2) == Appended(3, 3)


async def test_log_shorter_than_its_owner_knows_is_an_alarm(store: Store) -> None:
    log, ownership = await own(store)
    with pytest.raises(EventsLost, match="ends at event 1, but event 5 had been acknowledged"):
        await log.append_as_owner(ownership, [message()], expected_last_id=5)
    with pytest.raises(EventsLost):
        await Owners(store).release(ownership, seen_id=5)


async def test_an_owners_append_is_repeated_although_the_log_has_grown(
    store: Store, connect: Callable[[], Connection]
) -> None:
    _, ownership = await own(store)

    def loses(sent: Sequence[Argument]) -> bool:
        return sent[:2] == ("FCALL", "deck_append") and losing.lost == 0

    losing = broker_parts.LosingConnection(connect(), loses)
    lossy = await open_store(losing)
    outcome = await EventLog(lossy).append_as_owner(ownership, [message("a"), message("b")], expected_last_id=1)
    assert outcome == Duplicate(2, 3)
    assert await EventLog(store).load_last_id(CID) == 3
    await lossy.aclose()


async def test_two_decisions_on_the_same_ground_are_not_one(store: Store) -> None:
    log, ownership = await own(store)
    assert await log.append_as_owner(ownership, [message("a")], expected_last_id=1) == Appended(2, 2)
    assert await log.append_as_owner(ownership, [message("b")], expected_last_id=1) == Conflict(2)
    assert await log.load_last_id(CID) == 2


async def test_append_of_fields_alone_keeps_the_next_events(store: Store) -> None:
    log, ownership = await own(store)
    await log.append_as_owner(ownership, [], expected_last_id=1, fields={"state": "paused"})
    assert (await Conversations(store).load_row(CID)).state == "paused"
    assert await log.append_as_owner(ownership, [message()], expected_last_id=1) == Appended(2, 2)


async def test_an_action_gets_one_observation(store: Store) -> None:
    log, _ = await dispatch_one(store)
    assert await log.append_observation(CID, output(2, "first"), worker_id="t1") == Appended(3, 3)
    assert await log.append_observation(CID, output(2, "second"), worker_id="t2") == Duplicate(3, 3)
    assert [event.id for event in await log.read(CID)] == [1, 2, 3]


async def test_an_owner_settles_an_action_before_its_worker_does(store: Store) -> None:
    log, ownership = await dispatch_one(store)
    events = [message("stopped"), output(2)]
    assert await log.append_as_owner(ownership, events, expected_last_id=2, answers={1: 2}) == Appended(3, 4)
    assert await log.append_observation(CID, output(2), worker_id="t1") == Duplicate(4, 4)


async def test_listing_fields_are_written_with_the_events(store: Store) -> None:
    log, ownership = await own(store)
    fields = {"state": "running", "iterations": 3, "cost_usd": 0.25}
    await log.append_as_owner(ownership, [message()], expected_last_id=1, fields=fields)
    row = await Conversations(store).load_row(CID)
    assert (row.state, row.fields["iterations"], row.fields["cost_usd"]) == ("running", "3", "0.25")
    assert row.owner == "w1"
    assert row.updated >= row.created


async def test_many_writers_leave_no_gap(store: Store) -> None:
    log = await begin(store)
    writers = [log.append(CID, [message(f"{n}-{m}") for m in range(n % 3 + 1)], key=f"k{n % 40}") for n in range(60)]
    outcomes = await asyncio.gather(*writers)
    assert sum(isinstance(outcome, Appended) for outcome in outcomes) == 40
    events = await log.read(CID)
    assert [event.id for event in events] == list(range(1, 1 + 1 + sum(n % 3 + 1 for n in range(40))))
    for outcome in outcomes:
        written = events[outcome.first_id - 1 : outcome.last_id]
        contents = [event.content for event in written if isinstance(event, MessageAction)]
        assert [content.partition("-")[2] for content in contents] == [str(m) for m in range(len(written))]


async def test_only_dispatched_actions_are_queued(store: Store) -> None:
    log, ownership = await own(store)
    actions = [command("a"), command("b"), command("c")]
    await log.append_as_owner(ownership, actions, expected_last_id=1, dispatch=[0, 2])
    entries = await store.connection.call("XRANGE", store.all_shards[0].actions("pool:bash"), "-", "+")
    assert [dict(zip(flat[::2], flat[1::2], strict=True))[b"a"] for _, flat in entries] == [b"2", b"4"]


async def test_a_claim_tells_where_the_conversation_stands(store: Store) -> None:
    await begin(store, CID, message(), message())
    await enter(store, "w1")
    claimed = await Owners(store).claim(CID, "w1")
    assert (claimed.last_id, claimed.crashes, claimed.node, claimed.is_closed) == (3, 0, "", False)
    assert (claimed.ownership.conversation_id, claimed.ownership.worker_id) == (CID, "w1")


async def test_one_of_many_claims_wins(store: Store) -> None:
    await begin(store)
    for n in range(8):
        await enter(store, f"w{n}")
    outcomes = await asyncio.gather(*(Owners(store).claim(CID, f"w{n}") for n in range(8)))
    assert sum(isinstance(outcome, ClaimedConversation) for outcome in outcomes) == 1
    assert outcomes.count(ClaimFailure.OWNED) == 7


async def test_invalid_claims_are_refused(store: Store) -> None:
    await begin(store)
    await enter(store, "w1")
    owners = Owners(store)
    assert await owners.claim("nobody", "w1") is ClaimFailure.MISSING
    assert await owners.claim(CID, "unregistered") is ClaimFailure.SWEPT
    await claim(store, "w1")
    assert await owners.claim(CID, "w1") is ClaimFailure.YOURS


async def test_a_claim_whose_reply_was_lost_is_found_again(store: Store) -> None:
    await begin(store, CID, message())
    await enter(store, "w1")
    await enter(store, "w2")
    ownership = await claim(store, "w1")
    owners = Owners(store)
    assert await owners.resume_claim(CID, "w1") == ClaimedConversation(
        ownership, 2, 0, "", is_closed=False, rank=Priority.BATCH.rank
    )
    assert await owners.resume_claim(CID, "w2") is None
    assert await owners.resume_claim("nobody", "w1") is None


async def test_a_claim_of_an_owned_conversation_rings_its_owner(store: Store) -> None:
    await begin(store)
    await enter(store, "w1")
    await enter(store, "w2")
    await claim(store, "w1")
    await Owners(store).claim(CID, "w2")
    assert await mail_of(store, "w1") == [CID]


async def test_tokens_rise_even_when_the_clock_is_behind(store: Store) -> None:
    await begin(store)
    await enter(store, "w1")
    owners = Owners(store)
    tokens = []
    for _ in range(3):
        ownership = await claim(store, "w1")
        tokens.append(int(ownership.token))
        await owners.release(ownership, seen_id=1)
    assert tokens[0] < tokens[1] < tokens[2]
    far_ahead = 9_999_999_999_999
    await store.connection.call("HSET", store.known_keys(CID).meta, "token", far_ahead)
    assert (await claim(store, "w1")).token == str(far_ahead + 1)


async def test_release_gives_up_only_what_is_read_to_completion(store: Store) -> None:
    log, ownership = await own(store)
    owners = Owners(store)
    await log.append(CID, [message()])
    assert await owners.release(ownership, seen_id=1) == 2
    assert (await Conversations(store).load_row(CID)).owner == "w1"
    assert await owners.release(ownership, seen_id=2) is None
    assert (await Conversations(store).load_row(CID)).owner == ""


@pytest.mark.parametrize("is_claimed_again", [False, True])
async def test_a_released_token_writes_nothing(store: Store, is_claimed_again: bool) -> None:
    log, ownership = await own(store)
    owners = Owners(store)
    await owners.release(ownership, seen_id=1)
    later = await claim(store, "w1") if is_claimed_again else None
    assert await owners.release(ownership, seen_id=1) is None
    assert await log.append_as_owner(ownership, [message()], expected_last_id=1) == Fenced()
    assert not await owners.mark(ownership, Mark.ACTING)
    assert await owners.dispatch(ownership, 2, b"") == "fenced"
    with pytest.raises(OwnershipLost):
        await owners.check_start(ownership)
    assert (await Conversations(store).load_row(CID)).owner == ("w1" if later else "")
    if later:
        assert isinstance(await log.append_as_owner(later, [message()], expected_last_id=1), Appended)


async def test_news_after_a_release_rings_the_ready_stream(store: Store) -> None:
    log, ownership = await own(store)
    await Owners(store).release(ownership, seen_id=1)
    before = await notified(store)
    await log.append(CID, [message()])
    assert await notified(store) == [*before, CID]


async def test_a_parked_conversation_wakes_when_due(store: Store) -> None:
    await begin(store)
    worker = await enter(store, "w1")
    ownership = await claim(store, "w1")
    await Owners(store).release(ownership, seen_id=1, delay_seconds=3_600)
    assert (await worker.beat(1)).woken_count == 0
    ownership = await claim(store, "w1")
    await Owners(store).release(ownership, seen_id=1, delay_seconds=-0.001)
    before = len(await notified(store))
    assert (await worker.beat(2)).woken_count == 1
    assert len(await notified(store)) == before + 1
    assert (await worker.beat(3)).woken_count == 0


async def test_park_duration_ignores_the_workers_clock(store: Store, connect: Callable[[], Connection]) -> None:
    await begin(store)
    worker = await enter(store, "w1")
    # This clock is far behind the store's: by the store's, the conversation was due long ago.
    slow = await open_store(connect(), clock=ManualClock(datetime(2001, 1, 1, tzinfo=UTC)))
    ownership = await claim(store, "w1")
    await Owners(slow).release(ownership, seen_id=1, delay_seconds=3_600)
    assert (await worker.beat(1)).woken_count == 0
    score = float(await store.connection.call("ZSCORE", store.all_shards[0].parked, CID))
    assert abs(score - to_millis(store.clock.now()) - 3_600_000) < 60_000
    await slow.aclose()


async def test_a_claim_takes_a_conversation_out_of_the_parked(store: Store) -> None:
    await begin(store)
    worker = await enter(store, "w1")
    ownership = await claim(store, "w1")
    await Owners(store).release(ownership, seen_id=1, delay_seconds=0)
    await claim(store, "w1")
    assert (await worker.beat(1)).woken_count == 0


async def test_a_parked_conversation_that_is_gone_leaves_nothing_behind(store: Store) -> None:
    worker = await enter(store, "w1")
    await store.connection.call("ZADD", store.all_shards[0].parked, 1, "gone")
    await worker.beat(1)
    assert await store.connection.call("EXISTS", store.known_keys("gone").meta) == 0
    assert await notified(store) == []


async def test_a_snapshot_is_kept_under_the_current_token_only(store: Store) -> None:
    await begin(store)
    await enter(store, "w1")
    owners = Owners(store)
    assert await owners.load_snapshot(CID) is None
    old = await claim(store, "w1")
    assert await owners.save_snapshot(old, b"one")
    await owners.release(old, seen_id=1)
    new = await claim(store, "w1")
    assert await owners.save_snapshot(new, b"two\x00\xff")
    assert not await owners.save_snapshot(old, b"stale")
    assert await owners.load_snapshot(CID) == b"two\x00\xff"


async def test_last_ids_of_many(store: Store) -> None:
    await begin(store, "one-conversation", message())
    await begin(store, "another-conversation")
    assert await Owners(store).load_last_ids(["one-conversation", "nobody", "another-conversation"]) == [2, 0, 1]
    assert await Owners(store).load_last_ids([]) == []


async def test_owner_that_left_without_a_trace_is_replaced(store: Store) -> None:
    await begin(store)
    await enter(store, "w1")
    await enter(store, "w2")
    old = await claim(store, "w1")
    await store.connection.call("ZREM", store.all_shards[0].workers, "w1")
    new = await claim(store, "w2")
    assert int(new.token) > int(old.token)


async def test_close_and_requeue_name_an_unknown_conversation(store: Store) -> None:
    conversations = Conversations(store)
    for act in (conversations.close, conversations.requeue, conversations.load_row):
        with pytest.raises(UnknownConversation):
            await act("nobody")


async def test_a_closed_conversation_says_so_when_claimed(store: Store) -> None:
    await begin(store)
    await enter(store, "w1")
    await Conversations(store).close(CID)
    claimed = await Owners(store).claim(CID, "w1")
    assert claimed.is_closed


async def test_a_mark_is_refused_to_who_does_not_own(store: Store) -> None:
    _, ownership = await own(store)
    assert await Owners(store).mark(ownership, Mark.ACTING)
    assert not await Owners(store).mark(Ownership(CID, "w1", "1"), Mark.ACTING)
    await bury(store, "w1")
    assert not await Owners(store).mark(ownership, Mark.WAITING)
