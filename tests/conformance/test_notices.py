"""What an append leaves for others: notices of awaited conversations, and news for webhooks where there are any."""

from __future__ import annotations

import re

from broker.contract.events import ConversationCreated
from broker.contract.fencing import Ownership
from broker.coordination.membership import Membership
from broker.log.event_log import EventLog
from broker.secrets.secrets import Secrets
from broker.store.store import Store
from deckhands.operations.webhooks.repository import WebhookRepository
from tests.broker_parts import CID, begin, claim, command, enter, message, own


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


def book_of(store: Store) -> WebhookRepository:
    return WebhookRepository(store, Secrets(store, lambda: None))


async def news(store: Store) -> dict[str, int]:
    """What webhooks have not heard of yet, over all shards."""
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
