"""Notices: what an owner appends to a conversation that somebody waits for leaves one, and nothing else does."""

from __future__ import annotations

from broker.contract.events import ConversationCreated
from broker.contract.fencing import Ownership
from broker.coordination.membership import Membership
from broker.log.event_log import EventLog
from broker.store.store import Store
from tests.broker_parts import CID, claim, command, enter, message, own


async def noticed(store: Store) -> list[bytes]:
    entries = await store.connection.call("XRANGE", store.keys(CID).shard.notices, "-", "+")
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
    await store.connection.call("HDEL", store.keys(CID).meta, "noticed")
    await log.append_as_owner(ownership, [command()], expected_last_id=4)
    assert await noticed(store) == [CID.encode()] * 2


async def test_awaited_conversation_is_checked_without_a_notice(store: Store) -> None:
    await begin_awaited(store)
    names = store.keys(CID)
    assert await store.connection.call("ZSCORE", names.shard.awaited, CID) is not None
    assert await store.connection.call("HGET", names.meta, "awaited") == b"celery"


async def test_nobody_is_noticed_of_a_conversation_that_nobody_waits_for(store: Store) -> None:
    log, ownership = await own(store)
    await log.append_as_owner(ownership, [command()], expected_last_id=1)
    assert await noticed(store) == []
    assert await store.connection.call("ZSCORE", store.keys(CID).shard.awaited, CID) is None


async def test_ingress_recreates_its_lost_group(store: Store) -> None:
    membership = Membership(store, "d1", "ingress", ttl_seconds=3600.0)
    await membership.register()
    stream = store.all_shards[0].notices
    read = ("XREADGROUP", "GROUP", "ingresses", "d1", "COUNT", 1, "STREAMS", stream, ">")
    await store.connection.call(*read)
    await store.connection.call("DEL", stream)
    assert await membership.beat(1) is not None
    await store.connection.call(*read)
