"""Encrypted conversations: read as written, unreadable without their key, and not exchangeable."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from broker.contract import codec
from broker.contract.events import ConversationCreated
from broker.contract.specs import Tenancy
from broker.coordination.ownership import Owners
from broker.log.append_call import Appended, Duplicate, NewEntry, ProducerWriter, make_append_arguments
from broker.log.conversations import Conversations
from broker.log.deletion import Deletion
from broker.log.entries import find_latest_event
from broker.log.event_log import EventLog
from broker.log.live_text import LivePiece, LiveText
from broker.runtime.clock import SYSTEM_CLOCK, Clock
from broker.runtime.errors import CorruptEntry, DataForgotten, DataLocked, StoreMisconfigured, UsageError
from broker.store.connection import Connection
from broker.store.encryption import FRESH_SECONDS, Cipher, MasterKeys
from broker.store.store import Store, open_store
from broker.testing.manual_clock import ManualClock
from tests.broker_parts import CID, claim, command, enter, message, output
from tests.conversation_hands import WatchedConnection

MARKER = "plain-marker-4711"
BIG = f"{MARKER} " * 10_000


OLD = f"old:{base64.b64encode(bytes(range(32))).decode()}"
NEW = f"new:{base64.b64encode(bytes(range(1, 33))).decode()}"
Open = Callable[..., Awaitable[Store]]


@pytest.fixture
async def opened(connect: Callable[[], Connection]) -> AsyncIterator[Open]:
    """Open the store as another process, with some master keys."""
    stores: list[Store] = []

    async def open_it(masters: str = OLD, *, clock: Clock = SYSTEM_CLOCK, is_worker: bool = True) -> Store:
        store = await open_store(
            connect(), patience_seconds=5.0, masters=MasterKeys(masters), deploys=is_worker, clock=clock
        )
        stores.append(store)
        return store

    yield open_it
    for store in stores:
        await store.aclose()


async def begin(store: Store, cid: str = CID, tenant: str = "acme", *texts: str) -> EventLog:
    log = EventLog(store)
    created = ConversationCreated(conversation_id=cid, title=f"A {MARKER}", tenancy=Tenancy(tenant=tenant))
    assert isinstance(await log.create(created, [message(text) for text in texts], key="begin"), Appended)
    return log


async def has_blob(store: Store, text: str) -> bool:
    name = hashlib.sha256(text.encode()).hexdigest()
    return bool(await store.connection.call("EXISTS", store.known_keys(CID).blob(name)))


async def raw_of(store: Store, cid: str = CID) -> bytes:
    """Return all bytes that the store has of a conversation."""
    names, parts = store.known_keys(cid), []
    entries = await store.connection.call("XRANGE", names.events, "-", "+")
    parts += [entry[1][-1] for entry in entries]
    parts += await store.connection.call("HGETALL", names.meta)
    parts.append(await store.connection.call("GET", names.snapshot) or b"")
    parts += [part[1][-1] for part in await store.connection.call("XRANGE", names.live, "-", "+")]
    return b"\n".join(parts)


async def test_conversation_reads_as_written_without_plain_text_in_the_store(opened: Open) -> None:
    store = await opened()
    log = await begin(store, CID, "acme", f"do {MARKER}")
    await enter(store, "w1")
    ownership = await claim(store, "w1")
    done = await log.append_as_owner(ownership, [command(f"echo {MARKER}")], expected_last_id=2, dispatch=[0])
    assert isinstance(done, Appended)
    await log.append_observation(CID, output(3, MARKER), worker_id="t1")
    await log.append(CID, [message(BIG)])
    assert await Owners(store).save_snapshot(ownership, MARKER.encode(), seen_id=5)
    live = LiveText(store, CID)
    await live.add([LivePiece("1.1", "text", MARKER, 0)])
    other = await opened()
    events = await EventLog(other).read(CID)
    assert [event.id for event in events] == [1, 2, 3, 4, 5]
    assert events[1].content == f"do {MARKER}"
    assert (await EventLog(other).blobs.restore_event(CID, events[4])).content == BIG
    assert (await find_latest_event(other, CID, type(events[4]))) == events[4]
    assert await Owners(other).load_snapshot(CID) == MARKER.encode()
    assert [piece.text for piece in await LiveText(other, CID).read_rest()] == [MARKER]
    row = await Conversations(other).load_row(CID)
    assert (row.title, row.tenant) == (f"A {MARKER}", "acme")
    raw = await raw_of(store)
    assert MARKER.encode() not in raw
    assert b"marker" not in raw
    (blob,) = [ref.sha256 for ref in events[4].blobs.values()]
    content = await store.connection.call("GET", store.known_keys(CID).blob(blob))
    assert len(content) > len(BIG)
    assert b"marker" not in content


async def test_a_process_without_the_key_is_told_which_setting(opened: Open) -> None:
    store = await opened()
    await begin(store, CID, "acme", "hello")
    with pytest.raises(StoreMisconfigured, match="has no master key") as refused:
        await opened("")
    assert "DECKHANDS_MASTER_KEYS_FILE" in str(refused.value)
    client = await opened("", is_worker=False)
    log = EventLog(client)
    for call in (
        lambda: log.read(CID),
        lambda: log.append(CID, [message("in plain text")]),
        lambda: begin(client, "another"),
        lambda: find_latest_event(client, CID, ConversationCreated),
    ):
        with pytest.raises(DataLocked) as locked:
            await call()
        assert "DECKHANDS_MASTER_KEYS_FILE" in str(locked.value)
    assert await log.load_last_id(CID) == 2
    assert (await Conversations(client).load_row(CID)).title == ""
    wrong = await opened(NEW)
    with pytest.raises(DataLocked, match="master key 'old'"):
        await EventLog(wrong).read(CID)


async def test_conversations_from_before_continue_in_plain_text(
    connect: Callable[[], Connection], opened: Open
) -> None:
    plain = await open_store(connect(), masters=MasterKeys())
    await begin(plain, "before", "acme", "one")
    await plain.aclose()
    store = await opened()
    log = EventLog(store)
    await log.append("before", [message("two")])
    await begin(store, "after", "acme", "three")
    assert [event.content for event in (await log.read("before"))[1:]] == ["one", "two"]
    assert not codec.is_encrypted(await log.load_entry("before", 3))
    assert codec.is_encrypted(await log.load_entry("after", 2))


async def test_a_repeated_creation_leaves_a_plain_conversation_as_it_is(
    connect: Callable[[], Connection], opened: Open
) -> None:
    plain = await open_store(connect(), masters=MasterKeys())
    await begin(plain, CID, "acme", BIG)
    await plain.aclose()
    store = await opened()
    log = EventLog(store)
    created = ConversationCreated(conversation_id=CID, title=f"A {MARKER}", tenancy=Tenancy(tenant="acme"))
    assert isinstance(await log.create(created, [message(BIG)], key="begin"), Duplicate)
    await log.append(CID, [message(f"{BIG}more")])
    events = await log.read(CID)
    assert [(await log.blobs.restore_event(CID, event)).content for event in events[1:]] == [BIG, f"{BIG}more"]
    assert not any([codec.is_encrypted(await log.load_entry(CID, n)) for n in (1, 2, 3)])
    sealed = codec.encrypt_entry(codec.encode(message("x").wire()), Cipher("k" * 8, b"d" * 32, CID), None)
    await store.connection.call("XADD", store.known_keys(CID).events, "4-0", "e", sealed)
    with pytest.raises(DataLocked, match="was deleted"):
        await log.read(CID)
    assert await store.encryption.find_cipher(CID) is None


async def test_the_store_takes_no_encrypted_event_for_a_plain_conversation(
    connect: Callable[[], Connection], opened: Open
) -> None:
    plain = await open_store(connect(), masters=MasterKeys())
    await begin(plain, CID, "acme", "one")
    names = plain.known_keys(CID)
    sealed = codec.encrypt_entry(codec.encode(message("x").wire()), Cipher("k" * 8, b"d" * 32, CID), None)
    arguments = make_append_arguments(CID, ProducerWriter("k", "", False, None), [NewEntry(sealed, "", None)], (), {})
    assert await plain.call_function("deck_append", (names.root, names.shard.root), *arguments) == ["locked"]
    await plain.aclose()


async def test_process_without_keys_writes_no_large_encrypted_text(opened: Open) -> None:
    client = await opened("", is_worker=False)  # it was there before the store encrypted
    store = await opened()
    log = await begin(store, CID, "acme", BIG)
    for call in (
        lambda: EventLog(client).append(CID, [message(BIG)]),
        lambda: EventLog(client).append(CID, [message(f"{BIG}more")]),
        lambda: EventLog(client).create(ConversationCreated(conversation_id=CID), [message(BIG)], key="begin"),
    ):
        with pytest.raises(DataLocked):
            await call()
    (event,) = (await log.read(CID))[1:]
    assert (await log.blobs.restore_event(CID, event)).content == BIG
    assert await has_blob(store, BIG)
    assert not await has_blob(store, f"{BIG}more")


async def test_large_text_takes_the_key_of_a_recreated_conversation(
    connect: Callable[[], Connection], opened: Open
) -> None:
    plain = await open_store(connect(), masters=MasterKeys())
    await begin(plain, CID, "acme", "one")
    await plain.aclose()
    store, other = await opened(), await opened()
    assert await other.encryption.find_cipher(CID) is None
    await Deletion(store).delete(CID, last_id=2)
    await begin(store, CID, "acme", "two")
    await EventLog(other).append(CID, [message(BIG)])
    events = await EventLog(store).read(CID)
    assert (await EventLog(store).blobs.restore_event(CID, events[2])).content == BIG


async def test_entries_cannot_be_exchanged(opened: Open) -> None:
    store = await opened()
    log = await begin(store, CID, "acme", "one", "two")
    await begin(store, "other", "acme", "three", "four")
    one, three = await log.load_entry(CID, 2), await log.load_entry("other", 2)
    flipped = one[:-1] + bytes((one[-1] ^ 1,))
    for moved, event_id in ((one, 3), (three, 2), (flipped, 2), (one[:6], 2)):
        with pytest.raises((CorruptEntry, DataLocked)):
            await log.decode_entry(CID, moved, event_id)
    assert (await log.decode_entry(CID, one, 2)).content == "one"
    plain = codec.encode(message("forged").wire())
    await store.connection.call("XADD", store.known_keys(CID).events, "4-0", "e", plain)
    with pytest.raises((CorruptEntry, DataLocked), match="encrypted"):
        await log.read(CID)
    for reader in (log, EventLog(await opened())):
        with pytest.raises(CorruptEntry, match="not encrypted"):
            await reader.read(CID, after=3)
        with pytest.raises(CorruptEntry, match="not encrypted"):
            await reader.decrypt_entry(CID, plain, 4)
        with pytest.raises(CorruptEntry, match="not encrypted"):
            await find_latest_event(reader.store, CID, ConversationCreated)
    names = store.known_keys(CID)
    await store.connection.call("SET", names.snapshot, one)
    assert await Owners(store).load_snapshot(CID) is None


async def test_a_deleted_key_is_gone_for_every_process(opened: Open) -> None:
    clock = ManualClock()
    store = await opened()
    for n in range(20):
        await begin(store, f"log-{n}", "acme", "hello")
    await begin(store, "of-others", "shop", "hello")
    reader = await opened(clock=clock)
    log = EventLog(reader)
    assert len(await log.read("log-0")) == 2
    assert await store.encryption.delete_key("acme")
    assert not await store.encryption.delete_key("acme")
    clock.advance(FRESH_SECONDS)
    for n in range(20):
        with pytest.raises(DataForgotten, match="was deleted"):
            await log.read(f"log-{n}")
        with pytest.raises(DataLocked, match="was deleted"):
            await log.append(f"log-{n}", [message("more")])
    assert len(await log.read("of-others")) == 2
    await begin(reader, "new", "acme", "again")
    assert len(await log.read("new")) == 2
    await Deletion(reader).delete("log-0", last_id=2)
    assert [row.conversation_id for row in await Conversations(reader).load_rows(["log-0", "log-1"])] == ["log-1"]


async def test_a_listing_asks_once_for_a_deleted_key(connect: Callable[[], Connection], opened: Open) -> None:
    store = await opened()
    for n in range(20):
        await begin(store, f"log-{n}", "acme", "hello")
    await store.encryption.delete_key("acme")
    connection: Any = WatchedConnection(connect())
    reader = await open_store(connection, masters=MasterKeys(OLD), deploys=False, clock=ManualClock())
    rows = await Conversations(reader).load_rows([f"log-{n}" for n in range(20)])
    assert [row.title for row in rows] == [""] * 20
    assert connection.counts["HGET"] == 2  # the number of deletions, and the key
    await reader.aclose()


async def test_a_rotated_master_key_changes_the_data_keys_alone(opened: Open) -> None:
    store = await opened(OLD)
    await begin(store, CID, "acme", "hello")
    await begin(store, "other", "", "hello")
    raw = await raw_of(store)
    both = await opened(f"{NEW},{OLD}")
    assert [record.master_id for record in await both.encryption.list_keys()] == ["old", "old"]
    assert await both.encryption.rotate() == 2
    assert await both.encryption.rotate() == 0
    assert [(record.tenant, record.master_id) for record in await both.encryption.list_keys()] == [
        ("", "new"),
        ("acme", "new"),
    ]
    assert await raw_of(store) == raw
    rotated = await opened(NEW)
    assert len(await EventLog(rotated).read(CID)) == 2
    assert len(await EventLog(rotated).read("other")) == 2
    only_old = await opened(OLD)
    with pytest.raises(DataLocked, match="master key 'new'"):
        await only_old.encryption.rotate()


async def test_rotation_continues_past_an_unreadable_key(opened: Open) -> None:
    store = await opened(OLD)
    for tenant in ("a", "b", "c"):
        await begin(store, f"log-{tenant}", tenant)
    keys = {record.tenant: record.key_id for record in await store.encryption.list_keys()}
    await store.connection.call("HSET", store.all_shards[0].data_keys, f"key:{keys['b']}", "damaged")
    both = await opened(f"{NEW},{OLD}")
    with pytest.raises(DataLocked, match=f"2 data keys were changed, and 1 could not be: The data key {keys['b']} "):
        await both.encryption.rotate()
    assert [(record.tenant, record.master_id) for record in await both.encryption.list_keys()] == [
        ("a", "new"),
        ("c", "new"),
    ]


async def test_a_key_deleted_during_a_rotation_stays_deleted(opened: Open) -> None:
    store = await opened(OLD)
    await begin(store)
    (record,) = await store.encryption.list_keys()
    key = store.all_shards[0].data_keys
    read = await store.connection.call("HGET", key, f"key:{record.key_id}")
    await store.encryption.delete_key("acme")
    assert await store.call_function("deck_rewrap_key", (key,), record.key_id, read, "another") == ["kept"]
    assert await store.encryption.list_keys() == []


async def test_forged_records_of_data_keys_are_refused(opened: Open) -> None:
    store = await opened()
    await begin(store, CID, "acme", "hello")
    await begin(store, "other", "shop", "hello")
    acme, shop = await store.encryption.list_keys()
    key, call = store.all_shards[0].data_keys, store.connection.call
    records = {one.key_id: await call("HGET", key, f"key:{one.key_id}") for one in (acme, shop)}
    known = MasterKeys("evil:" + OLD.partition(":")[2][:-2] + "A=").wrap(acme.key_id, "acme", b"k" * 32)
    forged = [b"", b"{}", b"[]", b"\xff", records[shop.key_id], records[acme.key_id].replace(b"acme", b"shop"), known]
    for record in forged:
        await call("HSET", key, f"key:{acme.key_id}", record)
        reader = await opened()
        with pytest.raises((CorruptEntry, DataLocked)):
            await EventLog(reader).read(CID)
        assert len(await EventLog(reader).read("other")) == 2
    await call("HSET", key, f"key:{acme.key_id}", records[acme.key_id], "tenant:acme", shop.key_id)
    with pytest.raises(CorruptEntry, match="another tenant"):
        await begin(await opened(), "new", "acme")


async def test_another_key_under_a_known_id_locks_and_starts_nothing(opened: Open) -> None:
    client = await opened(f"old:{NEW.partition(':')[2]}", is_worker=False)  # it was there before the first data key
    store = await opened()
    await begin(store, CID, "acme", "hello")
    with pytest.raises(DataLocked, match="does not match the master key 'old'"):
        await EventLog(client).read(CID)
    with pytest.raises(StoreMisconfigured, match="master key 'old'") as refused:
        await opened(f"old:{NEW.partition(':')[2]},{NEW}")
    assert "DECKHANDS_MASTER_KEYS_FILE" in str(refused.value)
    assert len(await EventLog(await opened(f"{NEW},{OLD}")).read(CID)) == 2


async def test_a_fork_for_another_tenant_has_its_own_key(opened: Open) -> None:
    store = await opened()
    log = await begin(store, CID, "acme", "one")
    await log.append(CID, [message(BIG)])
    target = ConversationCreated(conversation_id="fork", tenancy=Tenancy(tenant="shop"))
    assert isinstance(await log.fork(CID, target, at=3), Appended)
    await store.encryption.delete_key("acme")
    other = await opened()
    events = await EventLog(other).read("fork")
    assert (await EventLog(other).blobs.restore_event("fork", events[2])).content == BIG


async def test_a_recreated_conversation_is_written_with_its_new_key(opened: Open) -> None:
    store, other = await opened(), await opened()
    await begin(store, CID, "acme", "one")
    assert len(await EventLog(other).read(CID)) == 2
    await Deletion(store).delete(CID, last_id=2)
    await begin(store, CID, "shop", "two")
    await EventLog(other).append(CID, [message("three")])  # it still knows the key of the deleted one
    assert [event.content for event in (await EventLog(store).read(CID))[1:]] == ["two", "three"]


async def test_simultaneous_creators_use_one_key_of_a_new_tenant(opened: Open) -> None:
    stores = [await opened() for _ in range(4)]
    for number in range(25):
        tenant = f"tenant-{number}"
        ids = [f"{tenant}-{at}" for at in range(len(stores))]
        await asyncio.gather(
            *(begin(store, cid, tenant, "first") for store, cid in zip(stores, ids, strict=True)),
            return_exceptions=False,
        )
        metas = [await stores[0].call("HGET", stores[0].known_keys(cid).meta, "data_key") for cid in ids]
        assert len(set(metas)) == 1
        assert [len(await EventLog(stores[-1]).read(cid)) for cid in ids] == [2] * len(ids)
    tenants = [record.tenant for record in await stores[0].encryption.list_keys()]
    assert sorted(tenants) == sorted(f"tenant-{number}" for number in range(25))


async def test_a_key_deleted_while_others_create_is_made_anew(opened: Open) -> None:
    creators, deleter = [await opened() for _ in range(3)], await opened()
    await begin(deleter, "known")
    ids = [f"c-{number}" for number in range(30)]
    await asyncio.gather(
        *(begin(creators[at % 3], cid) for at, cid in enumerate(ids)), deleter.encryption.delete_key("acme")
    )
    (record,) = await deleter.encryption.list_keys()
    metas = [await deleter.call("HGET", deleter.known_keys(cid).meta, "data_key") for cid in ids]
    late = [cid for cid, key in zip(ids, metas, strict=True) if key == record.key_id.encode()]
    reader = await opened()
    assert [len(await EventLog(reader).read(cid)) for cid in late] == [1] * len(late)


async def test_all_processes_use_one_key_for_a_tenant(opened: Open) -> None:
    for n in range(3):
        await begin(await opened(), f"log-{n}")
    store = await opened()
    assert [record.tenant for record in await store.encryption.list_keys()] == ["acme"]
    for n in range(3):
        assert len(await EventLog(store).read(f"log-{n}")) == 1


@pytest.mark.parametrize(
    "text",
    ["one", "one:", "one:abc", "one:c2hvcnQ=", OLD.replace("old", "a b"), f"{OLD},{OLD}"],
)
def test_unusable_master_keys_are_refused_without_showing_them(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        MasterKeys(text)
    assert not any(key in str(refused.value) for key in text.split(":")[1:] if key)


def test_file_of_master_keys_is_reread_for_an_unknown_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{OLD}\n")
    masters = MasterKeys(path=path)
    record = MasterKeys(NEW).wrap("k", "acme", b"x" * 32).encode()
    with pytest.raises(DataLocked):
        masters.unwrap("k", record)
    path.write_text(f"{NEW}\n{OLD}\n")
    assert masters.unwrap("k", record) == ("acme", b"x" * 32)
    third = OLD.replace("old", "third")
    path.write_text(f"{third}\n{NEW}\n{OLD}\n")
    os.utime(path, ns=(1, 1))
    assert MasterKeys(third).unwrap("k", masters.wrap("k", "acme", b"y" * 32).encode()) == ("acme", b"y" * 32)
    path.write_text(f"{third}\n{NEW[:20]}")  # half written
    assert masters.find("unknown") is None
    assert masters.wrap("k", "acme", b"y" * 32)
    path.unlink()
    assert masters.ids == ["third", "new", "old"]
    assert '"master": "third"' in masters.wrap("k", "acme", b"y" * 32)
    with pytest.raises(UsageError, match="DECKHANDS_MASTER_KEYS_FILE"):
        MasterKeys(path=path)
