"""Claim, release, parking, marks, snapshots: at most one token is current."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from broker.contract.fencing import Ownership
from broker.contract.specs import Priority
from broker.coordination.ownership import ClaimedConversation, ClaimFailure, Owners
from broker.log.append_call import Appended, Fenced
from broker.log.conversations import Conversations
from broker.runtime.clock import to_millis
from broker.runtime.errors import OwnershipLost, UnknownConversation
from broker.store.connection import Connection
from broker.store.store import Store, open_store
from broker.testing.manual_clock import ManualClock
from tests.broker_parts import CID, begin, bury, claim, enter, mail_of, message, notified, own


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


async def test_who_may_not_claim(store: Store) -> None:
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
    await store.connection.call("HSET", store.keys(CID).meta, "token", far_ahead)
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
    assert not await owners.mark(ownership, is_stepping=True)
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
    assert await store.connection.call("EXISTS", store.keys("gone").meta) == 0
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
    assert await Owners(store).mark(ownership, is_stepping=True)
    assert not await Owners(store).mark(Ownership(CID, "w1", "1"), is_stepping=True)
    await bury(store, "w1")
    assert not await Owners(store).mark(ownership, is_stepping=False)
