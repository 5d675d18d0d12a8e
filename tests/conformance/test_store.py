"""Opening a store: functions deployed, facts checked, another store than before noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from broker.contract.events import ConversationCreated
from broker.log.append_call import Duplicate
from broker.log.conversations import Conversations
from broker.log.event_log import EventLog
from broker.runtime.errors import OutcomeUnknown, StoreError, StoreMisconfigured, StoreTooNew
from broker.store import keys
from broker.store.connection import Connection
from broker.store.store import Store, open_store
from tests.broker_parts import LosingConnection, begin, message


async def test_a_store_keeps_its_facts(connect: Callable[[], Connection]) -> None:
    first = await open_store(connect(), shards=4)
    second = await open_store(connect(), shards=9)
    assert (first.shards, second.shards) == (4, 4)
    assert first.generation == second.generation
    assert [names.root for names in first.all_shards] == ["deck:{0}", "deck:{1}", "deck:{2}", "deck:{3}"]
    for store in (first, second):
        await store.aclose()


async def test_conversations_spread_over_the_shards(connect: Callable[[], Connection]) -> None:
    store = await open_store(connect(), shards=4)
    ids = [f"conversation-{n}" for n in range(40)]
    for cid in ids:
        await begin(store, cid)
    rows = await Conversations(store).list_recent(limit=100)
    assert sorted(row.conversation_id for row in rows) == sorted(ids)
    assert len(await Conversations(store).list_recent(limit=7)) == 7
    assert {store.keys(cid).shard.shard for cid in ids} == {0, 1, 2, 3}
    await store.aclose()


async def test_the_newest_conversation_is_listed_first(store: Store) -> None:
    for cid in ("aaa", "bbb", "ccc"):
        await begin(store, cid)
    await store.connection.call("ZADD", store.all_shards[0].index, 9_999_999_999_999, "bbb")
    assert [row.conversation_id for row in await Conversations(store).list_recent(limit=1)] == ["bbb"]


async def test_an_emptied_store_is_another_store(store: Store, connect: Callable[[], Connection]) -> None:
    await store.check_generation()
    await store.connection.call("DEL", keys.STORE)
    with pytest.raises(StoreMisconfigured, match="was emptied or replaced"):
        await store.check_generation()
    again = await open_store(connect())
    with pytest.raises(StoreMisconfigured, match="was emptied or replaced"):
        await store.check_generation()
    await again.check_generation()
    await again.aclose()


async def test_a_store_of_a_newer_schema_is_refused(connect: Callable[[], Connection]) -> None:
    connection = connect()
    await connection.call("HSET", keys.STORE, "schema", 99)
    with pytest.raises(StoreTooNew, match="The store has schema version 99; this version of Deckhands reads up to 1"):
        await open_store(connection)


async def test_function_error_is_an_error_of_the_store(store: Store) -> None:
    await store.connection.call("SET", store.keys("conversation-1").meta, "not a hash")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        await begin(store)


async def test_an_append_is_repeated_until_its_outcome_is_known(connect: Callable[[], Connection]) -> None:
    losing = LosingConnection(connect(), lambda sent: sent[0] == "FCALL" and losing.lost < 3)
    store = await open_store(losing)
    log = EventLog(store)
    # Written by the first try, whose reply was lost; the fourth brought the answer.
    assert await log.create(ConversationCreated(conversation_id="conversation-1")) == Duplicate(1, 1)
    assert losing.lost == 3
    await asyncio.gather(*(log.append("conversation-1", [message(str(n))]) for n in range(20)))
    assert [event.id for event in await log.read("conversation-1")] == list(range(1, 22))
    await store.aclose()


async def test_patience_ends(connect: Callable[[], Connection]) -> None:
    losing = LosingConnection(connect(), lambda sent: sent[0] == "FCALL")
    store = await open_store(losing, patience_seconds=0.1)
    with pytest.raises(OutcomeUnknown):
        await begin(store)
    assert losing.lost >= 2
    await store.aclose()
