"""A log that has lost its end, and then grown again past it: nobody takes another event for the one that was there."""

from __future__ import annotations

import pytest

from broker.contract.codec import checksum_of
from broker.contract.observations import EventsLostObservation
from broker.coordination.action_streams import ActionClaimed
from broker.coordination.ownership import ClaimedConversation, Owners
from broker.log.append_call import Appended
from broker.log.event_log import EventLog
from broker.log.follower import check_event_exists
from broker.log.lost_tails import record_gap
from broker.runtime.errors import EventsLost
from broker.store.store import Store
from tests.broker_parts import CID, act, begin, command, enter, message, output, pending, queue, take

WORKER = "controller-1"


async def claimed(store: Store) -> ClaimedConversation:
    await enter(store, WORKER)
    found = await Owners(store).claim(CID, WORKER)
    assert isinstance(found, ClaimedConversation)
    return found


async def checksum(log: EventLog, event_id: int) -> str:
    return checksum_of(await log.load_entry(CID, event_id))


async def lose(store: Store, *, after: int) -> None:
    """Take the end of the log away, as an older append-only file would."""
    names, call = store.keys(CID), store.connection.call
    entries = await call("XRANGE", names.events, "-", "+")
    await call("DEL", names.events)
    for entry_id, fields in entries[:after]:
        await call("XADD", names.events, entry_id, *fields)
    await call("HSET", names.meta, "last_id", after)


async def test_owner_does_not_continue_from_a_replaced_event(store: Store) -> None:
    log = await begin(store, CID, message("known"))
    ownership = (await claimed(store)).ownership
    known = await checksum(log, 2)
    await lose(store, after=1)
    await log.append(CID, [message("another")])
    for attempt in (
        lambda: log.append_as_owner(ownership, [message()], expected_last_id=2, checksum=known),
        lambda: log.read_new(ownership, after=2, checksum=known),
        lambda: Owners(store).release(ownership, seen_id=2, checksum=known),
        lambda: Owners(store).save_snapshot(ownership, b"state", seen_id=2, checksum=known),
        lambda: check_event_exists(store, CID, 2, known),
    ):
        with pytest.raises(EventsLost, match="holds another event 2, but event 2 had been acknowledged"):
            await attempt()
    assert await Owners(store).load_snapshot(CID) is None
    assert await log.load_last_id(CID) == 2
    right = await checksum(log, 2)
    appended = await log.append_as_owner(ownership, [message("mine")], expected_last_id=2, checksum=right)
    assert appended == Appended(3, 3)
    assert appended.checksum == await checksum(log, 3)
    await log.append(CID, [message("theirs")])
    new = await log.read_new(ownership, after=3, checksum=appended.checksum)
    assert [event.id for event in new.events] == [4]
    assert new.checksum == await checksum(log, 4)
    assert await Owners(store).save_snapshot(ownership, b"state", seen_id=4, checksum=new.checksum)
    assert await Owners(store).release(ownership, seen_id=4, checksum=new.checksum) is None


async def test_a_log_that_is_shorter_is_noticed_by_its_owner(store: Store) -> None:
    log = await begin(store, CID, message("known"), message("too"))
    ownership = (await claimed(store)).ownership
    known = await checksum(log, 3)
    await lose(store, after=1)
    with pytest.raises(EventsLost, match="ends at event 1, but event 3 had been acknowledged"):
        await log.read_new(ownership, after=3, checksum=known)
    with pytest.raises(EventsLost, match="ends at event 1"):
        await log.append_as_owner(ownership, [message()], expected_last_id=3, checksum=known)


async def test_an_observation_answers_the_action_that_was_carried_out(store: Store) -> None:
    log = await begin(store, CID, command("old"))
    old = await checksum(log, 2)
    await lose(store, after=1)
    with pytest.raises(EventsLost, match="ends at event 1, but event 2"):
        await log.append_observation(CID, output(2), worker_id="tool-1", checksum=old)
    await log.append(CID, [command("new")])
    with pytest.raises(EventsLost, match="holds another event 2"):
        await log.append_observation(CID, output(2), worker_id="tool-1", checksum=old)
    new = await checksum(log, 2)
    assert await log.append_observation(CID, output(2), worker_id="tool-1", checksum=new) == Appended(3, 3)


async def test_claim_of_a_lost_action_does_not_take_its_number(store: Store) -> None:
    """A claim can be under way while the store is away; the older store that it reaches has no such action."""
    log = await begin(store)
    await enter(store, WORKER)
    for worker in ("tool-1", "tool-2"):
        await enter(store, worker, node="node")
    ownership, action_id = await act(store, WORKER)
    first, second = queue(store, "tool-1", node="node"), queue(store, "tool-2", node="node")
    old = await take(first)
    await lose(store, after=1)
    with pytest.raises(EventsLost, match="ends at event 1, but event 2"):
        await first.claim(old)
    assert await pending(store, store.all_shards[0].actions("pool:bash"), "tools") == 0
    decided = await log.append_as_owner(ownership, [command("another")], expected_last_id=1, dispatch=[0])
    assert decided == Appended(action_id, action_id)
    with pytest.raises(EventsLost, match="holds another event 2"):
        await first.claim(old)
    new = await take(second)
    assert await second.claim(new) == ActionClaimed(1)
    for reader in (first, second):
        await reader.aclose()


async def test_a_gap_is_named_once(store: Store) -> None:
    log = await begin(store, CID, message(), message(), message())
    known, earlier = await checksum(log, 4), await checksum(log, 3)
    await lose(store, after=2)
    lost = EventsLost(CID, 2, 4, known)
    assert await record_gap(log, lost, noticed_by="one") == 3
    assert await record_gap(log, lost, noticed_by="one") == 3
    assert await record_gap(log, EventsLost(CID, 2, 3, earlier), noticed_by="another") == 3
    *_, gap = await log.read(CID)
    assert isinstance(gap, EventsLostObservation)
    assert (gap.id, gap.last_id, gap.known_id, gap.noticed_by) == (3, 2, 4, "one")
    assert "event 4 had been written, and the log ended at event 2" in gap.content
    assert await record_gap(log, EventsLost(CID, 3, 9), noticed_by="who knows of more") == 4
    assert await record_gap(log, EventsLost("gone", 3, 9), noticed_by="nobody") == 0


async def test_a_token_from_before_the_loss_is_worth_nothing(store: Store) -> None:
    await begin(store, CID)
    meta, call = store.keys(CID).meta, store.connection.call
    before = await call("HGETALL", meta)
    first = (await claimed(store)).ownership
    await call("DEL", meta)
    await call("HSET", meta, *before)  # the store has lost that anybody has claimed it
    await enter(store, "controller-2")
    second = await Owners(store).claim(CID, "controller-2")
    assert int(second.ownership.token) >= int(first.token)
    assert await EventLog(store).append_as_owner(first, [message()], expected_last_id=1) != Appended(2, 2)
