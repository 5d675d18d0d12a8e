"""Raising the number of shards: nothing moves, nothing is created twice, and every list is complete."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from broker.contract import ConversationCreated, Tenancy, WorkspaceSpec
from broker.coordination.membership import Membership, list_members
from broker.coordination.ownership import ClaimedConversation, Owners
from broker.coordination.quarantine import find_conversation_keys
from broker.coordination.shard_raise import raise_shards
from broker.coordination.transfers import StoredFiles
from broker.coordination.wakeups import WorkerMailbox
from broker.log.append_call import Appended, Duplicate
from broker.log.conversations import Conversations
from broker.log.deletion import Deletion
from broker.log.event_log import EventLog
from broker.log.follower import check_event_exists
from broker.runtime.errors import ShardsRaised, StoreMisconfigured, StoreUnavailable, UsageError
from broker.store import keys
from broker.store.connection import Connection
from broker.store.keys import ShardKeys, shard_of
from broker.store.layout import ShardLayout, parse_numbers
from broker.store.store import Store, open_store
from tests.broker_parts import act, begin, enter, message

Connect = Callable[[], Connection]


def displaced(count: int, *numbers: int) -> list[str]:
    """Ids that each number of shards puts elsewhere."""
    found = (f"conversation-{n}" for n in range(10_000))
    several = (cid for cid in found if len({shard_of(cid, number) for number in numbers}) == len(numbers))
    return [next(several) for _ in range(count)]


async def test_existing_conversations_stay_and_new_ones_spread(connect: Connect) -> None:
    store = await open_store(connect(), shards=1)
    ids = displaced(12, 1, 4)
    old, new = ids[:6], ids[6:]
    for cid in old:
        await begin(store, cid)
    result = await raise_shards(store, 4)
    assert (result.before, result.after, result.unaware) == (1, 4, ())
    for cid in new:
        await begin(store, cid)
    assert [(await store.locate(cid)).shard.shard for cid in old] == [0] * 6
    assert [names.shard.shard for names in await store.locate_all(new)] == [shard_of(cid, 4) for cid in new]
    for cid in ids:
        await EventLog(store).append(cid, [message("more")])
        assert len(await EventLog(store).read(cid)) == 2
    rows = await Conversations(store).list_recent(limit=100)
    assert sorted(row.conversation_id for row in rows) == sorted(ids)
    later = await open_store(connect(), shards=9)
    assert (later.shards, later.layout.numbers) == (4, (1, 4))
    assert [await later.locate(cid) for cid in ids] == [await store.locate(cid) for cid in ids]
    for one in (store, later):
        await one.aclose()


async def test_a_stale_process_creates_no_conversation_twice(connect: Connect) -> None:
    store, stale = await open_store(connect(), shards=2), await open_store(connect())
    first, second = displaced(2, 2, 8)
    await raise_shards(store, 8)
    created = ConversationCreated(conversation_id=first)
    assert isinstance(await EventLog(store).create(created, [], key="k"), Appended)
    assert stale.shards == 2
    with pytest.raises(ShardsRaised, match="Shards were added"):
        await EventLog(stale).create(created, [], key="k", shards=2)
    assert isinstance(await EventLog(stale).create(created, [], key="k"), Duplicate)
    assert stale.shards == 8
    stale.layout.numbers = (2,)
    await begin(stale, second)  # nobody has placed it elsewhere
    assert await store.locate(second) == await stale.locate(second)
    assert sorted(row.conversation_id for row in await Conversations(store).list_recent(limit=9)) == [first, second]
    for one in (store, stale):
        await one.aclose()


async def test_a_conversation_created_before_its_placement_is_found(connect: Connect) -> None:
    store, stale = await open_store(connect(), shards=2), await open_store(connect())
    (cid,) = displaced(1, 2, 8)
    await raise_shards(store, 8)
    created = ConversationCreated(conversation_id=cid)
    outcome = await EventLog(stale).create(created, [], key="k", shards=2)  # before any other process has placed it
    assert isinstance(outcome, Appended)
    assert isinstance(await EventLog(store).create(created, [], key="k"), Duplicate)
    assert (await store.locate(cid)).shard == ShardKeys(shard_of(cid, 2))
    for one in (store, stale):
        await one.aclose()


async def test_a_deleted_conversation_is_created_anew_in_a_new_shard(connect: Connect) -> None:
    store = await open_store(connect(), shards=1)
    (cid,) = displaced(1, 1, 4)
    await begin(store, cid)
    await raise_shards(store, 4)
    assert (await store.locate(cid)).shard.shard == 0
    await Deletion(store).delete(cid, last_id=1)
    await begin(store, cid)
    assert (await store.locate(cid)).shard.shard == shard_of(cid, 4)
    await store.aclose()


async def test_worker_works_in_new_shards_from_its_next_beat(connect: Connect) -> None:
    store, other = await open_store(connect(), shards=1), await open_store(connect())
    worker = await enter(store, "w1")
    await raise_shards(other, 4, limit_seconds=0.0)
    assert await worker.join_new_shards() == []
    await worker.beat(1)
    assert [names.shard for names in await worker.join_new_shards()] == [1, 2, 3]
    assert await worker.beat(2) is not None
    (member,) = await list_members(store)
    assert member.about["shards"] == "4"
    assert (await raise_shards(other, 4, limit_seconds=0.0)).unaware == ()
    old, new = displaced(2, 1, 4)
    for cid in (old, new):
        await begin(other, cid)
        assert isinstance(await Owners(store).claim(cid, "w1"), ClaimedConversation)
    assert sorted(await Owners(store).list_owned("w1")) == sorted([old, new])
    await worker.leave()
    assert await Owners(other).list_owned("w1") == []
    for one in (store, other):
        await one.aclose()


async def test_an_entry_of_the_wrong_shard_is_refused(connect: Connect) -> None:
    store = await open_store(connect(), shards=1)
    old, new, never = displaced(3, 1, 4)
    await begin(store, old)
    await raise_shards(store, 4)
    await begin(store, new)
    home = ShardKeys(shard_of(new, 4))
    assert (await find_conversation_keys(store, home, new.encode())).shard == home
    assert (await find_conversation_keys(store, ShardKeys(0), never.encode())).shard.shard == 0  # it was deleted
    for names, cid in ((ShardKeys(0), new), (ShardKeys(shard_of(old, 4)), old)):
        with pytest.raises(ValueError, match="not of this shard"):
            await find_conversation_keys(store, names, cid.encode())
    await store.aclose()


async def test_the_number_is_neither_lowered_nor_raised_past_its_limits(connect: Connect) -> None:
    store = await open_store(connect(), shards=4)
    for number, text in {3: "cannot be lowered", 1_025: "1,025 shards are too many"}.items():
        with pytest.raises(UsageError, match=text):
            await raise_shards(store, number)
    for number in range(5, 20):
        await raise_shards(store, number)
    with pytest.raises(UsageError, match="raised 15 times already"):
        await raise_shards(store, 20)
    assert store.shards == 19
    await store.aclose()


async def test_workers_that_cannot_read_more_shards_are_named(connect: Connect) -> None:
    store = await open_store(connect(), shards=1)
    await enter(store, "old-1")
    await store.call("HDEL", store.all_shards[0].worker_facts("old-1"), "shards")
    with pytest.raises(UsageError, match="too old to read more shards: old-1"):
        await raise_shards(store, 4)
    assert store.shards == 1
    await store.aclose()


async def test_simultaneous_raises_lose_none(connect: Connect) -> None:
    store, other = await open_store(connect(), shards=1), await open_store(connect())
    assert await store.call_function("deck_raise_shards", (keys.STORE,), "1", "1,4") == ["raised"]
    assert await other.call_function("deck_raise_shards", (keys.STORE,), "1", "1,2") == ["changed"]
    assert other.shards == 1
    await raise_shards(other, 8)
    assert other.layout.numbers == (1, 4, 8)
    for one in (store, other):
        await one.aclose()


async def test_rules_of_tenants_and_webhooks_hold_in_the_new_shards(connect: Connect) -> None:
    store = await open_store(connect(), shards=1)
    (first,) = store.all_shards
    await store.call_function("deck_set_tenants", (first.root,), "acme", "2.000000 3 0.000000")
    await store.call("HSET", first.webhook_tenants, "acme", "1")
    await raise_shards(store, 3)
    for names in store.all_shards[1:]:
        assert await store.call("HGETALL", names.tenants) == await store.call("HGETALL", first.tenants)
        assert await store.call("HGETALL", names.webhook_tenants) == [b"acme", b"1"]
        assert await store.call("HGET", names.clock, "hooked") == b"1"
    await store.aclose()


@pytest.mark.parametrize("text", ["", "0", "4,1", "1,1", "1,2048", "1,x", "-1", "1,,4", "²", "1" * 99])
async def test_a_damaged_number_is_named(connect: Connect, text: str) -> None:
    with pytest.raises(ValueError, match="not a list"):
        parse_numbers(text)
    store = await open_store(connect(), shards=2)
    await store.call("HSET", keys.STORE, "shards", text)
    await store.refresh()  # a running process keeps what it knows
    assert store.shards == 2
    with pytest.raises(StoreMisconfigured, match="The field shards of deck:store"):
        await open_store(connect())
    await store.aclose()


def test_remembered_places_are_bounded() -> None:
    layout = ShardLayout(1, 4, max_remembered=2)
    a, b, c = displaced(3, 1, 4)
    for cid in (a, b, c):
        layout.remember(keys.ConversationKeys(ShardKeys(0), cid))
    assert layout.find(a) is None
    assert layout.find(b) == keys.ConversationKeys(ShardKeys(0), b)
    layout.update((1,))
    assert layout.count == 4


async def test_a_swept_worker_is_not_revived_by_new_shards(store: Store) -> None:
    membership = Membership(store, "w1", "controller", ttl_seconds=3600.0)
    await membership.register()
    await store.call("ZREM", store.all_shards[0].workers, "w1")
    await raise_shards(store, store.shards + 1, limit_seconds=0.0)
    await membership.join_new_shards()
    assert await membership.beat(1) is None


async def test_note_about_an_existing_conversation_is_in_its_shard(connect: Connect) -> None:
    store = await open_store(connect(), shards=1)
    (cid,) = displaced(1, 1, 4)
    tenancy = Tenancy(tenant="acme")
    created = ConversationCreated(conversation_id=cid, workspace=WorkspaceSpec(pool="gpu"), tenancy=tenancy)
    log = EventLog(store)
    await log.create(created, [], key="k")
    await enter(store, "w1")
    ownership, action_id = await act(store, "w1", cid)
    await raise_shards(store, 4, limit_seconds=0.0)
    store.layout.forget(cid)
    with pytest.raises(LookupError, match="Only `locate` finds"):
        store.known_keys(cid)
    assert await log.find_action(cid, action_id) is not None
    assert (await log.load_workspace(cid)).pool == "gpu"
    assert await log.load_tenant(cid) == "acme"
    assert not await log.is_workspace_used(cid)
    results = f"{(await store.locate(cid)).root}:results"
    mailbox = WorkerMailbox(store, ShardKeys(0), ownership.worker_id)
    await store.call("XADD", results, "*", "a", action_id, "e", "unusable")
    await store.call("XADD", ShardKeys(0).mailbox("w1"), "*", "c", cid, "r", "1")
    await mailbox.read()
    assert await store.call("EXISTS", results) == 0
    for one in (mailbox, store):
        await one.aclose()


async def test_recreated_conversation_is_found_where_the_old_one_was_known(connect: Connect) -> None:
    store = await open_store(connect(), shards=1)
    (cid,) = displaced(1, 1, 4)
    await begin(store, cid)
    await raise_shards(store, 4)
    others = [await open_store(connect()) for _ in range(8)]
    for one in others:
        assert (await one.locate(cid)).shard == ShardKeys(0)
    await Deletion(store).delete(cid, last_id=1)
    await EventLog(store).create(ConversationCreated(conversation_id=cid), [message(), message()], key="again")
    new = ShardKeys(shard_of(cid, 4))
    reader, appender, finder, follower, waker, lister, owner, closer = others
    assert len(await EventLog(reader).read(cid)) == 3
    await EventLog(appender).append(cid, [message()])
    assert await EventLog(finder).find_action(cid, 2) is None
    await check_event_exists(follower, cid, 3)
    assert (await find_conversation_keys(waker, new, cid.encode())).shard == new
    assert (await Conversations(lister).load_row(cid)).conversation_id == cid
    await enter(owner, "w1")
    assert isinstance(await Owners(owner).claim(cid, "w1"), ClaimedConversation)
    await Conversations(closer).close(cid)
    for one in (store, *others):
        await one.aclose()


@pytest.mark.parametrize("command", [("HSET", "title", "x"), ("SET", "x")])
async def test_a_stray_key_in_an_older_shard_hides_no_conversation(connect: Connect, command: tuple[str, ...]) -> None:
    store = await open_store(connect(), shards=1)
    (cid,) = displaced(1, 1, 4)
    await raise_shards(store, 4)
    await begin(store, cid)
    name, *rest = command
    await store.call(name, keys.ConversationKeys(ShardKeys(0), cid).meta, *rest)
    store.layout.forget(cid)
    assert (await store.locate(cid)).shard == ShardKeys(shard_of(cid, 4))
    await store.call("DEL", keys.ConversationKeys(ShardKeys(0), cid).meta)
    await store.call("HSET", keys.ConversationKeys(ShardKeys(0), cid).meta, "last_id", "9")
    store.layout.forget(cid)
    assert (await store.locate(cid)).shard == ShardKeys(shard_of(cid, 4))
    await store.aclose()


async def test_a_raise_that_a_store_has_lost_is_written_back(connect: Connect) -> None:
    store = await open_store(connect(), shards=1)
    worker = await enter(store, "w1")
    await raise_shards(store, 4, limit_seconds=0.0)
    await worker.join_new_shards()
    await store.call("HSET", keys.STORE, "shards", "1")
    await worker.beat(1)
    later = await open_store(connect())
    assert later.layout.numbers == (1, 4)
    for one in (store, later):
        await one.aclose()


async def test_a_raise_includes_what_workers_and_shards_know(connect: Connect) -> None:
    store = await open_store(connect(), shards=1)
    (cid,) = displaced(1, 1, 4, 8)
    worker = await enter(store, "w1")
    await raise_shards(store, 4, limit_seconds=0.0)
    await worker.join_new_shards()
    await begin(store, cid)
    for source in ("worker", "shard"):
        await store.call("HSET", keys.STORE, "shards", "1")
        other = await open_store(connect())
        if source == "shard":
            await store.call("DEL", ShardKeys(0).workers)
        await raise_shards(other, 8, limit_seconds=0.0)
        assert other.layout.numbers == (1, 4, 8)
        assert (await other.locate(cid)).shard == ShardKeys(shard_of(cid, 4))
        await other.aclose()
    await store.aclose()


def test_a_layout_forgets_no_number() -> None:
    layout = ShardLayout(1, 4)
    layout.update((1, 8))
    assert layout.numbers == (1, 4, 8)


async def test_silent_store_delays_no_look_at_the_layout(connect: Connect) -> None:
    store = await open_store(connect(), shards=1, patience_seconds=None)
    connection = Unanswering(store.connection)
    quiet = replace(store, connection=connection)  # type: ignore[arg-type]
    assert (await quiet.locate("a")).shard == ShardKeys(0)
    assert connection.asked == 0
    quiet._refreshed[0] = -math.inf
    found = await asyncio.gather(*(quiet.locate("a") for _ in range(9)))
    assert {one.shard for one in found} == {ShardKeys(0)}
    assert connection.asked == 1
    await store.aclose()


@pytest.mark.parametrize("what", ["a raise meanwhile", "an older place that named it"])
async def test_data_of_a_new_conversation_is_stored_in_its_shard(connect: Connect, what: str) -> None:
    store, other = await open_store(connect(), shards=1), await open_store(connect())
    (cid,) = displaced(1, 1, 4)
    if what != "a raise meanwhile":
        await raise_shards(store, 4)
        await store.locate(cid, seen_in=ShardKeys(0))
    created = ConversationCreated(conversation_id=cid, tenancy=Tenancy(tenant="acme"))

    async def create(shards: int) -> object:
        await StoredFiles(store).put(cid, "file", b"content")
        if shards == 1:
            await raise_shards(other, 4)
            store._refreshed[0] = -math.inf
        return await EventLog(store).create(created, [], key="k", shards=shards)

    await store.repeat_if_raised(cid, create)
    await other.refresh()
    names = await other.locate(cid)
    assert names.shard == ShardKeys(shard_of(cid, 4))
    assert await store.call("HGET", names.stored_file("file"), "size") == b"7"
    for one in (store, other):
        await one.aclose()


class Unanswering:
    """A connection that gets no reply."""

    is_cluster = False

    def __init__(self, inner: Connection) -> None:
        self.inner = inner
        self.asked = 0

    async def call(self, *_: object) -> None:
        self.asked += 1
        raise StoreUnavailable("It does not answer.")
