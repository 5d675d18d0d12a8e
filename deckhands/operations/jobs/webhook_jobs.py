"""The jobs `webhooks` and `deliver`: plan the deliveries of webhooks, and make the requests.

`webhooks` reads new events of conversations, plans the deliveries, and sends a `deliver` for each line that is due.
`deliver` makes the first deliveries of one line.

Holds: no event is missed after a crash. A conversation is removed from the list of news only when all its deliveries
are planned; a planned delivery stays in the store until it has ended; the line of a crashed worker is due again after a
minute. Deliveries of a conversation to a webhook are made one after another, in the order of its events; a later one
waits until an earlier one was delivered or given up. Slow receivers delay neither other jobs nor other tenants.
Does not: guarantee a single delivery. If a worker crashes after a request, it is repeated under the same id.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

from broker.contract import Event, decode_any
from broker.log import EventLog, find_copied_ids
from broker.runtime import (
    CorruptEntry,
    DataForgotten,
    DeckhandsError,
    StoreRefused,
    StoreUnavailable,
    UnknownConversation,
    draw_jitter,
    failpoint,
    is_conversation_id,
    make_extra,
)
from broker.secrets import SecretsLocked
from broker.store import ShardKeys, decode_fields
from deckhands.operations.jobs.job import JobServices
from deckhands.operations.webhooks.repository import DeliveryLine, UnknownWebhook, WebhookRepository
from deckhands.operations.webhooks.sending import WebhookResponse, parse_networks, sign
from deckhands.operations.webhooks.webhook import RETRY_SECONDS, TOKEN_HEADER, Delivery, Webhook, build_delivery

NOTIFY_SECONDS = 2.0
READ_AT_ONCE = 500
LINES_AT_ONCE = 256
PLANNED_AT_ONCE = 16
MOST_EVENTS = 2.0**52
DELIVERED_AT_ONCE = 50
CLOCKS_DIFFER_SECONDS = 60.0
"""The maximum difference between machines' clocks; a new webhook may get events that are this much older."""
GONE = "its receiver has answered 410 Gone"
FULL = "too many deliveries are waiting"

_log = logging.getLogger(__name__)


async def has_news(services: JobServices) -> bool:
    """Return whether there are webhooks, or leftovers of removed ones."""
    return await open_repository(services).has_work()


async def notify(services: JobServices) -> dict[str, int]:
    """Plan deliveries and send due ones. Returns how many conversations had news, and how many lines were sent."""
    repository = open_repository(services)
    try:
        return await _notify(services, repository)
    except StoreRefused as error:
        if "WRONGTYPE" not in error.message:
            raise
        await repository.rename_foreign_keys()
        return {"looked_at": 0, "sent": 0}


async def _notify(services: JobServices, book: WebhookRepository) -> dict[str, int]:
    hooks = await book.all()
    await book.mark_tenants(sorted({hook.tenant for hook in hooks}))
    free = asyncio.Semaphore(PLANNED_AT_ONCE)
    shards = services.store.all_shards
    looked_at = sum(await asyncio.gather(*(_plan_shard(services, book, hooks, names, free) for names in shards)))
    lines = await book.due(LINES_AT_ONCE)
    for line in lines:
        await services.send_job("deliver", line.webhook_id, line.conversation_id, line.due)
    return {"looked_at": looked_at, "sent": len(lines)}


async def deliver(services: JobServices, webhook_id: str, conversation_id: str, due: str) -> int:
    """Make the deliveries of a line, unless another worker has it now. Returns how many requests were made."""
    repository = open_repository(services)
    line = DeliveryLine(str(webhook_id), str(conversation_id), str(due))
    try:
        tenant = (await repository.webhook(line.webhook_id)).tenant
    except UnknownWebhook:
        await repository.take(line)  # this also ends the line of a removed webhook
        return 0
    try:
        async with services.slots.acquire(tenant):
            return await _deliver(services, repository, line)
    except TimeoutError:  # receivers are slow: the line is due again in a minute
        return 0


async def _deliver(services: JobServices, book: WebhookRepository, line: DeliveryLine | None) -> int:
    for made in range(DELIVERED_AT_ONCE):
        taken = await book.take(line) if line is not None else None
        if taken is None:
            return made
        try:
            hook = await book.webhook(taken[0].webhook_id)
        except UnknownWebhook:
            return made
        line, is_delivered = await _make_attempt(services, book, hook, taken)
        if not is_delivered:
            return made + 1
    return DELIVERED_AT_ONCE


def open_repository(services: JobServices) -> WebhookRepository:
    """Return the webhooks of a worker's store."""
    return WebhookRepository(services.store, services.client.secrets)


async def _plan_shard(
    services: JobServices, book: WebhookRepository, hooks: list[Webhook], names: ShardKeys, free: asyncio.Semaphore
) -> int:
    """Plan the deliveries for conversations of a shard, and return how many had news."""
    cursor = b"0"
    looked_at = 0
    store = services.store

    async def look(conversation_id: str, first: int) -> None:
        async with free:
            try:
                await _plan(services, book, hooks, conversation_id, first)
            except StoreUnavailable:
                raise
            except (DeckhandsError, ValueError) as error:
                _log.warning(
                    "cannot plan webhooks for %s: %s", conversation_id, error, extra=make_extra(conversation_id)
                )

    while True:
        command = ("ZSCAN", names.webhook_news, cursor, "COUNT", READ_AT_ONCE)
        cursor, flat = await store.call(*command)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        found = [(raw.decode(errors="replace"), min(max(float(score), 1.0), MOST_EVENTS)) for raw, score in pairs]
        looked_at += len(found)
        await asyncio.gather(*(look(name, int(first)) for name, first in found if is_conversation_id(name)))
        if cursor == b"0":
            return looked_at


async def _plan(
    services: JobServices, book: WebhookRepository, hooks: list[Webhook], conversation_id: str, first: int
) -> None:
    """Plan the deliveries for a conversation's new events, then remove it from the list of news."""
    store, names = services.store, await services.store.locate(conversation_id)
    flat = await store.call("HGETALL", names.meta)
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    await store.encryption.decrypt_fields([conversation_id], [fields])
    meta = decode_fields([part for field in fields.items() for part in field])
    told_of = [hook for hook in hooks if hook.is_for(conversation_id, meta.get("tenant", ""))]
    events: list[Event] = []
    last, old = int(meta.get("last_id", "0")), find_copied_ids(meta)
    start = old.stop if first in old else first
    if told_of and last >= start:
        # Up to the copied events; the next run continues after them.
        until = min(last, start + READ_AT_ONCE - 1, old.start - 1 if start < old.start else last)
        try:
            events = await EventLog(store).read(conversation_id, after=start - 1, until=until, decode=decode_any)
        except UnknownConversation:
            events = []
        except (CorruptEntry, DataForgotten) as error:  # without its key, the news stay for the next run
            text = "webhooks miss events %d to %d of %s: %s"
            _log.error(text, start, until, conversation_id, error, extra=make_extra(conversation_id))
        last = until
    full: set[str] = set()
    for event in events:
        for hook in told_of:
            is_old = event.timestamp is not None and event.timestamp < hook.created - timedelta(
                seconds=CLOCKS_DIFFER_SECONDS
            )
            if is_old or hook.id in full or not hook.match_event(event):
                continue
            delivery = build_delivery(hook, conversation_id, event, meta, store.clock.now())
            if await book.plan(hook, delivery) == "full":
                full.add(hook.id)
                await _turn_off(book, hook, FULL)
    failpoint("jobs.planned")
    await store.call_function("deck_told", (names.root, names.shard.root), conversation_id, first, last)


async def _make_attempt(
    services: JobServices,
    book: WebhookRepository,
    hook: Webhook,
    taken: tuple[DeliveryLine, Delivery],
) -> tuple[DeliveryLine | None, bool]:
    """Make one request and record its result; return the line, and whether the next delivery may follow."""
    line, delivery = taken
    now = book.now()
    try:
        headers = sign(book.load_secret(hook), delivery.id, now, delivery.body)
        if token := book.load_token(hook):
            headers[TOKEN_HEADER] = token
        rules = parse_networks(services.settings.webhook_private)
        answer = await services.request(hook.url, delivery.body, headers, rules, _trust())
    except SecretsLocked as error:
        answer = WebhookResponse(None, error.message[:300])
    failpoint("jobs.delivered")
    attempts = delivery.attempts + 1
    reported: dict[str, Any] = {
        "attempts": attempts,
        "status": answer.status,
        "error": answer.error,
        "next_attempt": None,
    }
    if answer.error and attempts <= len(RETRY_SECONDS) and not answer.is_gone:
        pause = RETRY_SECONDS[attempts - 1] * draw_jitter()
        reported["next_attempt"] = now + timedelta(seconds=pause)
        await book.end_attempt(line, delivery.model_copy(update=reported), pause)
        return None, False
    reported["state"] = "failed" if answer.error else "delivered"
    ended = await book.end_attempt(line, delivery.model_copy(update=reported), None)
    if answer.is_gone:
        await _turn_off(book, hook, GONE)
    return ended, True


@cache
def _trust() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _turn_off(book: WebhookRepository, hook: Webhook, why: str) -> None:
    _log.warning("the webhook %s is turned off: %s", hook.id, why)
    with suppress(UnknownWebhook):
        await book.set_enabled(hook.id, is_enabled=False, why_off=why)
