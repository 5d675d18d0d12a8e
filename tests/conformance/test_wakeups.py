"""Wake-ups and notices: coalesced, in order, repeated when unanswered; none is lost for good."""

from __future__ import annotations

import asyncio
import random
import re
import string
from collections.abc import Callable
from typing import Any

from broker.contract.codec import checksum_of
from broker.contract.events import ConversationCreated
from broker.contract.fencing import Ownership
from broker.coordination.membership import Membership
from broker.coordination.ownership import ClaimedConversation, Owners
from broker.coordination.wakeups import CarriedEvent, ReadyStream, WorkerMailbox
from broker.log.event_log import EventLog
from broker.secrets.secrets import Secrets
from broker.store.connection import Connection
from broker.store.store import Store, open_store
from broker.testing.memory_store import MemoryConnection
from deckhands.operations.webhooks.repository import WebhookRepository
from tests import broker_parts
from tests.broker_parts import (
    CID,
    begin,
    claim,
    command,
    dispatch_one,
    enter,
    mail_of,
    message,
    notified,
    output,
    own,
    pending,
)

Closing = Callable[[Any], Any]


async def tick_without_patience(store: Store, worker_id: str) -> int:
    """Beat, and ring again whatever was rung before this moment; return how much that was."""
    reply = await store.call_function("deck_tick", (store.all_shards[0].root,), worker_id, 3_600_000, 1, 0)
    return int(reply[3])


async def test_rings_are_coalesced_until_the_claim(store: Store) -> None:
    log = await begin(store)
    for _ in range(5):
        await log.append(CID, [message()])
    assert await notified(store) == [CID]


async def test_a_quiet_append_rings_nobody(store: Store) -> None:
    log, _ = await own(store)
    await log.append(CID, [message()], quiet=True)
    assert await mail_of(store, "w1") == []


async def test_mail_is_coalesced_until_the_news_are_read(store: Store) -> None:
    log, ownership = await own(store)
    await log.append(CID, [message("a")])
    await log.append(CID, [message("b")])
    assert await mail_of(store, "w1") == [CID]
    assert [event.id for event in (await log.read_new(ownership, after=1)).events] == [2, 3]
    await log.append(CID, [message("c")])
    assert await mail_of(store, "w1") == [CID, CID]
    assert [event.id for event in (await log.read_new(ownership, after=3)).events] == [4]


async def test_the_news_say_whether_somebody_looks_on(store: Store) -> None:
    _, ownership = await own(store)
    log = EventLog(store)
    assert not (await log.read_new(ownership, after=0)).is_watched
    await store.connection.call("SET", store.known_keys(CID).watcher_mark, "1")
    assert (await log.read_new(ownership, after=0)).is_watched


async def test_the_ready_stream_hands_each_conversation_to_one_worker(store: Store, closing: Closing) -> None:
    ids = [f"conversation-{n}" for n in range(6)]
    for cid in ids:
        await begin(store, cid)
    for worker in ("w1", "w2"):
        await enter(store, worker)
    streams = [closing(ReadyStream(store, store.all_shards[0], worker)) for worker in ("w1", "w2")]
    first = await streams[0].read(limit=4)
    second = await streams[1].read(limit=4)
    assert [cid for cid, _ in first] == ids[:4]
    assert [cid for cid, _ in second] == ids[4:]
    for cid, entry in first:
        assert isinstance(await Owners(store).claim(cid, "w1", ready_entry=entry), ClaimedConversation)
    assert await pending(store, store.all_shards[0].ready, "controllers") == 2


async def test_a_blocked_read_wakes_with_the_ring(store: Store, closing: Closing) -> None:
    await enter(store, "w1")
    stream = closing(ReadyStream(store, store.all_shards[0], "w1"))
    reading = asyncio.create_task(stream.read(limit=1))
    await asyncio.sleep(0)
    await begin(store)
    (found,) = await asyncio.wait_for(reading, 1.5)
    assert found[0] == CID


async def test_a_mailbox_gives_each_conversation_once(store: Store, closing: Closing) -> None:
    log = await begin(store, "conversation-1")
    await begin(store, "conversation-2")
    await enter(store, "w1")
    first = await claim(store, "w1", "conversation-1")
    await claim(store, "w1", "conversation-2")
    await log.append("conversation-1", [message()])
    await log.read_new(first, after=1)
    await log.append("conversation-2", [message()])
    await log.append("conversation-1", [message()])
    mailbox = closing(WorkerMailbox(store, store.all_shards[0], "w1"))
    assert list(await mailbox.read()) == ["conversation-1", "conversation-2"]


async def test_an_observation_comes_with_its_wake_up(store: Store, closing: Closing) -> None:
    log, _ = await dispatch_one(store)
    before = checksum_of(await log.load_entry(CID, 2))
    await log.append_observation(CID, output(2), worker_id="t1", checksum=before)
    mailbox = closing(WorkerMailbox(store, store.all_shards[0], "w1"))
    entry = await log.load_entry(CID, 3)
    assert await mailbox.read() == {CID: CarriedEvent(3, entry, before, is_watched=False)}
    # It needs no answer: the next event rings by itself.
    assert await store.connection.call("HGET", store.known_keys(CID).meta, "rung") is None
    await log.append(CID, [message()])
    assert await mailbox.read() == {CID: None}


async def test_a_large_observation_comes_without_its_text(store: Store, closing: Closing) -> None:
    log, _ = await dispatch_one(store)
    large = "".join(random.Random(0).choices(string.ascii_letters, k=30_000))  # 22,000 bytes at least, as it is packed
    await log.append_observation(CID, output(2, large), worker_id="t1")
    mailbox = closing(WorkerMailbox(store, store.all_shards[0], "w1"))
    assert await mailbox.read() == {CID: None}


async def test_read_mail_does_not_stay_in_the_store(memory_store: Store, closing: Closing) -> None:
    log, _ = await dispatch_one(memory_store)
    await log.append_observation(CID, output(2), worker_id="t1")
    names = memory_store.all_shards[0]
    mailbox = closing(WorkerMailbox(memory_store, names, "w1"))
    assert len(await mailbox.read()) == 1
    while await memory_store.connection.call("XLEN", names.mailbox("w1")):
        assert await mailbox.read() == {}


async def test_a_lost_ring_is_rung_again(store: Store) -> None:
    await begin(store)
    await enter(store, "w1")
    names = store.all_shards[0]
    await store.connection.call("XTRIM", names.ready, "MAXLEN", "=", 0)
    assert await tick_without_patience(store, "w1") == 1
    assert await notified(store) == [CID]
    claimed = await Owners(store).claim(CID, "w1")
    assert isinstance(claimed, ClaimedConversation)
    assert await tick_without_patience(store, "w1") == 0


async def test_a_ring_that_waits_for_a_reader_is_not_repeated(store: Store) -> None:
    await begin(store)
    await enter(store, "w1")
    assert await tick_without_patience(store, "w1") == 0
    assert await notified(store) == [CID]


async def test_a_ring_is_given_time_to_be_answered(store: Store) -> None:
    await begin(store)
    worker: Membership = await enter(store, "w1")
    await store.connection.call("XTRIM", store.all_shards[0].ready, "MAXLEN", "=", 0)
    assert (await worker.beat(1)).notified_again == 0


async def test_a_ring_whose_delivery_was_lost_is_read_again(
    store: Store, closing: Closing, connect: Callable[[], Connection]
) -> None:
    await begin(store)
    await enter(store, "w1")
    losing = closing(await open_store(broker_parts.LosingConnection(connect(), broker_parts.every_first("XREADGROUP"))))
    stream = closing(ReadyStream(losing, store.all_shards[0], "w1"))
    ((cid, entry),) = await stream.read(limit=1)
    assert isinstance(await Owners(store).claim(cid, "w1", ready_entry=entry), ClaimedConversation)
    assert await pending(store, store.all_shards[0].ready, "controllers") == 0


async def test_ring_unanswered_by_a_live_worker_is_repeated(store: Store, closing: Closing) -> None:
    await begin(store)
    names = store.all_shards[0]
    readers = []
    for worker in ("w1", "w2"):
        await enter(store, worker)
        readers.append(closing(ReadyStream(store, names, worker)))
    await readers[0].read(limit=1)
    assert await tick_without_patience(store, "w2") == 1
    ((cid, entry),) = await readers[1].read(limit=1)
    assert isinstance(await Owners(store).claim(cid, "w2", ready_entry=entry), ClaimedConversation)
    assert await pending(store, names.ready, "controllers") == 0


async def test_answered_rings_are_trimmed(store: Store, closing: Closing) -> None:
    worker = await enter(store, "w1")
    names = store.all_shards[0]
    stream = closing(ReadyStream(store, names, "w1"))
    for n in range(20):
        await begin(store, f"conversation-{n}")
    for _ in range(3):  # no more than the window of a stream wait in it at once
        for cid, entry in await stream.read(limit=20):
            await Owners(store).claim(cid, "w1", ready_entry=entry)
    await worker.beat(1)
    assert await store.connection.call("XLEN", names.ready) == 1  # the last one delivered marks the place


async def test_rings_reach_the_log_of_whoever_owns_it_now(store: Store) -> None:
    log: EventLog = await begin(store)
    await enter(store, "w1")
    await enter(store, "w2")
    first = await claim(store, "w1")
    await Owners(store).release(first, seen_id=1)
    await claim(store, "w2")
    await log.append(CID, [message()])
    assert await mail_of(store, "w1") == []
    assert await mail_of(store, "w2") == [CID]


async def noticed(store: Store) -> list[bytes]:
    entries = await store.connection.call("XRANGE", store.known_keys(CID).shard.notices, "-", "+")
    return [fields[1] for _, fields in entries]


async def begin_awaited(store: Store) -> tuple[EventLog, Ownership]:
    log = EventLog(store)
    created = ConversationCreated(conversation_id=CID)
    await log.create(created, [message()], key="begin", awaited="celery")
    await enter(store, "w1")
    return log, await claim(store, "w1")


async def test_owners_append_is_noticed_once_until_read(store: Store) -> None:
    log, ownership = await begin_awaited(store)
    assert await noticed(store) == []
    await log.append_as_owner(ownership, [command()], expected_last_id=2)
    await log.append_as_owner(ownership, [command()], expected_last_id=3)
    assert await noticed(store) == [CID.encode()]
    await store.connection.call("HDEL", store.known_keys(CID).meta, "noticed")
    await log.append_as_owner(ownership, [command()], expected_last_id=4)
    assert await noticed(store) == [CID.encode()] * 2


async def test_awaited_conversation_is_checked_without_a_notice(store: Store) -> None:
    await begin_awaited(store)
    names = store.known_keys(CID)
    assert await store.connection.call("ZSCORE", names.shard.awaited, CID) is not None
    assert await store.connection.call("HGET", names.meta, "awaited") == b"celery"


async def test_conversation_without_waiters_causes_no_notice(store: Store) -> None:
    log, ownership = await own(store)
    await log.append_as_owner(ownership, [command()], expected_last_id=1)
    assert await noticed(store) == []
    assert await store.connection.call("ZSCORE", store.known_keys(CID).shard.awaited, CID) is None


async def test_ingress_recreates_its_lost_group(store: Store) -> None:
    membership = Membership(store, "d1", "ingress", ttl_seconds=3600.0)
    await membership.register()
    stream = store.all_shards[0].notices
    read = ("XREADGROUP", "GROUP", "ingresses", "d1", "COUNT", 1, "STREAMS", stream, ">")
    await store.connection.call(*read)
    await store.connection.call("DEL", stream)
    assert await membership.beat(1) is not None
    await store.connection.call(*read)


def book_of(store: Store) -> WebhookRepository:
    return WebhookRepository(store, Secrets(store, lambda: None))


async def test_every_shard_gets_its_turn_whatever_repository_a_run_has() -> None:
    store = await open_store(MemoryConnection(), shards=4)
    for names in store.all_shards:
        lines = [(0, f"wh_{names.root} c-{number}") for number in range(200)]
        await store.connection.call("ZADD", f"{names.webhooks}:due", *(part for line in lines for part in line))
    found = [line.webhook_id for _ in range(200) for line in await book_of(store).due(1)]
    assert len(found) == 200
    assert set(found) == {f"wh_{names.root}" for names in store.all_shards}
    await store.aclose()


async def news(store: Store) -> dict[str, int]:
    """Return the events that webhooks have not processed yet, over all shards."""
    found: dict[str, int] = {}
    for names in store.all_shards:
        flat = await store.connection.call("ZRANGE", names.webhook_news, 0, -1, "WITHSCORES")
        found |= {name.decode(): int(score) for name, score in zip(flat[::2], flat[1::2], strict=True)}
    return found


async def calls_of(store: Store, command: str) -> int:
    text = (await store.connection.call("INFO", "commandstats")).decode()
    found = re.search(rf"cmdstat_{command}:calls=(\d+)", text)
    return int(found[1]) if found else 0


async def test_append_notes_its_first_event_for_listening_tenants(store: Store) -> None:
    log = await begin(store, "before")
    await book_of(store).mark_tenants(["another"])
    await log.append("before", [message()])
    assert await news(store) == {}
    await book_of(store).mark_tenants(["*"])
    await log.append("before", [message(), message()])
    await log.append("before", [message()])
    await begin(store, "behind")
    assert await news(store) == {"before": 3, "behind": 1}


async def test_without_webhooks_an_append_reads_two_hashes(valkey_store: Store) -> None:
    log = await begin(valkey_store, "plain")
    for tenants, reads in (([], 2), (["*"], 3)):
        await book_of(valkey_store).mark_tenants(tenants)
        before = await calls_of(valkey_store, "hmget")
        await log.append("plain", [message()])
        assert await calls_of(valkey_store, "hmget") - before == reads, tenants


async def test_lost_clock_is_noted_again_with_the_next_beat(store: Store) -> None:
    log = await begin(store, "kept")
    await book_of(store).mark_tenants(["*"])
    for names in store.all_shards:
        await store.connection.call("SET", names.clock, "forged")
    await enter(store, "worker-1")
    await log.append("kept", [message()])
    assert await news(store) == {"kept": 2}
