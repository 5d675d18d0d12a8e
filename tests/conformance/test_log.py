"""Reading a log: whole, in parts, as it grows; forks, blobs, damage, and an end that was lost and replaced."""

from __future__ import annotations

import asyncio
import gc

import pytest

from broker.contract import codec
from broker.contract.actions import MessageAction
from broker.contract.codec import checksum_of
from broker.contract.events import ConversationCreated
from broker.contract.file_events import FileReadObservation
from broker.contract.observations import CmdOutputObservation, EventsLostObservation
from broker.coordination.action_streams import ActionClaimed
from broker.coordination.ownership import ClaimedConversation, DispatchOutcome, Owners
from broker.log.append_call import Appended, Duplicate
from broker.log.blobs import Blobs
from broker.log.entries import find_latest_event
from broker.log.event_log import EventLog
from broker.log.follower import check_event_exists
from broker.log.lost_tails import record_gap
from broker.runtime.errors import CorruptEntry, EventsLost, StoreTooNew, UnknownConversation, UnknownKind, UsageError
from broker.store.store import Store
from tests.broker_parts import (
    CID,
    act,
    begin,
    claim,
    command,
    dispatch_one,
    enter,
    message,
    output,
    pending,
    queue,
    take,
)

BIG = "".join(f"line {n}\n" for n in range(10_000))


async def test_parts_of_a_log(store: Store) -> None:
    log = await begin(store, CID, *(message(str(n)) for n in range(2, 11)))
    assert [event.id for event in await log.read(CID)] == list(range(1, 11))
    assert [event.id for event in await log.read(CID, after=7)] == [8, 9, 10]
    assert [event.id for event in await log.read(CID, after=3, until=5)] == [4, 5]
    assert await log.read(CID, after=10) == []
    assert await log.read(CID, after=50) == []
    assert await log.load_last_id(CID) == 10


async def test_a_log_longer_than_a_batch(store: Store) -> None:
    log = await begin(store)
    for _ in range(5):
        await log.append(CID, [message("x")] * 500)
    assert [event.id for event in await log.read(CID)] == list(range(1, 2_502))
    await enter(store, "w1")
    ownership = await claim(store, "w1")
    assert [event.id for event in (await log.read_new(ownership, after=1)).events] == list(range(2, 2_502))
    assert await log.fork(CID, ConversationCreated(conversation_id="forked"), at=2_501) == Appended(1, 2_501)


async def test_a_small_first_page_comes_before_the_rest(store: Store) -> None:
    log = await begin(store)
    await log.append(CID, [message("x")] * 1_100)
    pages = [[event.id for event in page] async for page in log.read_pages(CID, first_size=3)]
    assert pages == [[1, 2, 3], list(range(4, 1_004)), list(range(1_004, 1_102))]
    assert [len(page) async for page in log.read_pages(CID, first_size=3, until=3)] == [3]


async def test_an_unknown_conversation_has_no_log(store: Store) -> None:
    log = EventLog(store)
    for look in (log.read, log.load_last_id, lambda cid: anext(log.tail(cid))):
        with pytest.raises(UnknownConversation):
            await look("nobody")


async def test_an_event_comes_back_as_it_was(store: Store) -> None:
    log = await begin(store)
    sent = CmdOutputObservation(content="ü\0🙂\u202e", command="ls", cause=7, timestamp=store.clock.now())
    await log.append(CID, [sent])
    created, found = await log.read(CID)
    assert found == sent.model_copy(update={"id": 2})
    assert created.timestamp is not None
    assert abs((store.clock.now() - created.timestamp).total_seconds()) < 60


async def test_a_tail_follows(store: Store) -> None:
    log = await begin(store, CID, message("a"))
    tail = log.tail(CID, after=1)
    assert (await anext(tail)).id == 2
    coming = asyncio.ensure_future(anext(tail))
    await asyncio.sleep(0)
    await log.append(CID, [message("b"), message("c")])
    assert (await asyncio.wait_for(coming, 2)).id == 3
    assert (await anext(tail)).id == 4
    await tail.aclose()


async def test_a_tail_from_beyond_the_end_is_an_alarm(store: Store) -> None:
    log = await begin(store, CID, message("a"))
    with pytest.raises(EventsLost, match="ends at event 2, but event 9 had been acknowledged"):
        await anext(log.tail(CID, after=9))


async def test_several_tails_see_the_same(store: Store) -> None:
    log = await begin(store)
    tails = [log.tail(CID) for _ in range(3)]

    async def first(tail: object, number: int) -> list[int]:
        return [(await anext(tail)).id for _ in range(number)]  # type: ignore[call-overload]

    readers = [asyncio.ensure_future(first(tail, 21)) for tail in tails]
    for n in range(20):
        await log.append(CID, [message(str(n))])
    for seen in await asyncio.wait_for(asyncio.gather(*readers), 5):
        assert seen == list(range(1, 22))
    for tail in tails:
        await tail.aclose()


async def test_a_fork_has_the_same_past_and_its_own_future(store: Store) -> None:
    log = await begin(store, CID, message("a"), message("b"), message("c"))
    target = ConversationCreated(conversation_id="forked", forked_from=CID)
    assert await log.fork(CID, target, at=3) == Appended(1, 3)
    assert await log.fork(CID, target, at=3) == Duplicate(1, 3)
    forked, source = await log.read("forked"), await log.read(CID)
    assert forked[1:] == source[1:3]
    assert forked[0].conversation_id == "forked"  # type: ignore[attr-defined]
    await log.append("forked", [message("d")])
    assert await log.load_last_id(CID) == 4
    with pytest.raises(UsageError, match="has 4 events; it cannot be forked at 9"):
        await log.fork(CID, ConversationCreated(conversation_id="third"), at=9)


async def test_a_fork_does_not_run_again_what_has_run(store: Store) -> None:
    log, _ = await dispatch_one(store)
    await log.append_observation(CID, output(2), worker_id="t1")
    await log.fork(CID, ConversationCreated(conversation_id="forked"), at=3)
    ownership = await claim(store, "w1", "forked")
    entry = await log.load_entry("forked", 2)
    assert await Owners(store).dispatch(ownership, 2, entry) is DispatchOutcome.SETTLED
    assert await log.append_observation("forked", output(2), worker_id="t1") == Duplicate(3, 3)


async def test_a_fork_carries_its_large_texts_along(store: Store) -> None:
    log = await begin(store, CID, FileReadObservation(path="a", content=BIG))
    await log.fork(CID, ConversationCreated(conversation_id="forked"), at=2)
    (event,) = await log.read("forked", after=1)
    whole = await Blobs(store).restore_event("forked", event)
    assert isinstance(whole, FileReadObservation)
    assert whole.content == BIG


async def test_a_large_text_is_kept_beside_the_log(store: Store) -> None:
    log = await begin(store, CID, FileReadObservation(path="a", content=BIG))
    (event,) = await log.read(CID, after=1)
    assert isinstance(event, FileReadObservation)
    assert event.content.startswith("line 0\nline 1\n")
    assert event.content.endswith("line 9998\nline 9999\n")
    assert "characters left out; the whole is kept beside the log" in event.content
    assert len(event.content) < 16_000
    assert event.blobs is not None
    assert event.blobs["content"].size_bytes == len(BIG)
    whole = await Blobs(store).restore_event(CID, event)
    assert (whole.content, whole.id, whole.blobs) == (BIG, 2, None)


async def test_a_lost_or_changed_blob_is_named(store: Store) -> None:
    log = await begin(store, CID, FileReadObservation(path="a", content=BIG))
    (event,) = await log.read(CID, after=1)
    assert event.blobs is not None
    key = store.known_keys(CID).blob(event.blobs["content"].sha256)
    for damage in (("SET", key, "something else"), ("DEL", key)):
        await store.connection.call(*damage)
        with pytest.raises(CorruptEntry, match="The blob of the field 'content' is missing or damaged"):
            await Blobs(store).restore_event(CID, event)


def damaged_entry() -> bytes:
    entry = bytearray(codec.encode(message("x").wire()))
    entry[-1] ^= 1
    return bytes(entry)


@pytest.mark.parametrize(
    ("event_id", "fields", "error", "why"),
    [
        (2, ("e", damaged_entry()), CorruptEntry, r"Event 2 cannot be read: An entry does not match its checksum\."),
        (
            3,
            ("e", codec.encode(message("x").wire())),
            CorruptEntry,
            "Event 2 is missing from the log; the next one is 3",
        ),
        (2, ("other", "x"), CorruptEntry, "Event 2"),
        (2, ("e", codec.encode(message("x").wire(), schema_version=9)), StoreTooNew, "written with schema version 9"),
        (
            2,
            ("e", codec.encode({"kind": "action.teleport"})),
            UnknownKind,
            r"Event 2 is of the kind 'action\.teleport'",
        ),
    ],
    ids=["damaged", "gap", "another shape", "newer version", "unknown kind"],
)
async def test_an_unreadable_event_is_named(
    store: Store, event_id: int, fields: tuple[str, bytes | str], error: type[Exception], why: str
) -> None:
    log = await begin(store)
    await store.connection.call("XADD", store.known_keys(CID).events, f"{event_id}-0", *fields)
    with pytest.raises(error, match=why):
        await log.read(CID)
    assert gc.isenabled()  # a reader pauses it
    assert [event.id for event in await log.read(CID, until=1)] == [1]


async def test_a_trimmed_log_is_damage(store: Store) -> None:
    log = await begin(store, CID, message(), message())
    await store.connection.call("XTRIM", store.known_keys(CID).events, "MINID", "2-0")
    with pytest.raises(CorruptEntry, match="Event 1 is missing from the log; the next one is 2"):
        await log.read(CID)
    assert [event.id for event in await log.read(CID, after=1)] == [2, 3]


async def test_one_entry_of_a_log(store: Store) -> None:
    log = await begin(store, CID, message("x"))
    assert codec.decode(await log.load_entry(CID, 2), 2) == (await log.read(CID))[1]
    with pytest.raises(CorruptEntry, match="Event 3 is missing from the log"):
        await log.load_entry(CID, 3)


async def test_latest_event_of_a_class_is_found_from_the_end(store: Store) -> None:
    log = await begin(store)
    await log.append(CID, [message(str(n)) for n in range(70)])
    latest = await find_latest_event(store, CID, MessageAction)
    assert (latest.id, latest.content) == (71, "69")
    created = await find_latest_event(store, CID, ConversationCreated)  # behind two whole batches
    assert created.id == 1
    assert await find_latest_event(store, CID, CmdOutputObservation) is None


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
    names, call = store.known_keys(CID), store.connection.call
    entries = await call("XRANGE", names.events, "-", "+")
    await call("DEL", names.events)
    for entry_id, fields in entries[:after]:
        await call("XADD", names.events, entry_id, *fields)
    await call("HSET", names.meta, "last_id", after)
    noted = (await call("HGETALL", names.once))[::2]
    lost = [field for field in noted if field[1:2] == b":" and field[2:].isdigit() and int(field[2:]) > after]
    await call("HDEL", names.once, "none", *lost)


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


async def test_report_about_a_lost_action_is_refused(store: Store) -> None:
    log = await begin(store, CID, command("old"))
    cause = (2, await checksum(log, 2))
    assert await log.append(CID, [message("before")], key="first", cause=cause) == Appended(3, 3)
    await lose(store, after=1)
    with pytest.raises(EventsLost, match="ends at event 1, but event 2"):
        await log.append(CID, [message("report")], key="report", cause=cause)
    await log.append(CID, [command("new")])
    with pytest.raises(EventsLost, match="holds another event 2"):
        await log.append(CID, [message("report")], key="report", cause=cause)
    assert await log.load_last_id(CID) == 2


async def test_claim_of_a_lost_action_does_not_take_its_number(store: Store) -> None:
    """A claim can be in progress while the store is away; the older store that it reaches has no such action."""
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
    meta, call = store.known_keys(CID).meta, store.connection.call
    before = await call("HGETALL", meta)
    first = (await claimed(store)).ownership
    await call("DEL", meta)
    await call("HSET", meta, *before)  # the store has lost the claim
    await enter(store, "controller-2")
    second = await Owners(store).claim(CID, "controller-2")
    assert int(second.ownership.token) >= int(first.token)
    assert await EventLog(store).append_as_owner(first, [message()], expected_last_id=1) != Appended(2, 2)
