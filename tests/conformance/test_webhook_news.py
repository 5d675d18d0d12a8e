"""What an append notes for webhooks, and that it costs nothing where there are none."""

from __future__ import annotations

import re

from broker.secrets.secrets import Secrets
from broker.store.store import Store
from deckhands.operations.webhooks.repository import WebhookRepository
from tests.broker_parts import begin, enter, message


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
