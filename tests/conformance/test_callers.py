"""Callers of a conversation: stored with it, and notified of its progress and of its end."""

from __future__ import annotations

import pytest

from broker.contract.events import ConversationCreated
from broker.log.event_log import EventLog
from broker.secrets.secrets import Secrets
from broker.store.connection import decode_fields
from broker.store.store import Store
from deckhands.ingress.callers import CELERY, Caller, Callers
from tests.broker_parts import CID, claim, enter, message


@pytest.fixture
def callers(store: Store) -> Callers:
    return Callers(store, Secrets(store, lambda: None))


async def create(store: Store, callers: Callers, caller: Caller) -> EventLog:
    log = EventLog(store)
    created = ConversationCreated(conversation_id=CID)
    await log.create(created, key="k", awaited=caller.awaited, caller=callers.to_fields(caller))
    return log


async def test_the_first_caller_of_a_conversation_stays(store: Store, callers: Callers) -> None:
    first, second = Caller(CID, CELERY, "first"), Caller(CID, CELERY, "second")
    await create(store, callers, first)
    await create(store, callers, second)
    await callers.add(second)
    found = await callers.of(CID)
    assert found is not None
    assert found.name == "first"


async def test_caller_of_another_type_does_not_prevent_a_conversation(store: Store, callers: Callers) -> None:
    await store.connection.call("SET", store.known_keys(CID).caller, "no hash")
    await create(store, callers, Caller(CID, CELERY, "task"))
    found = await callers.of(CID)
    assert found is not None
    assert found.name == "task"


async def test_an_end_is_notified_though_progress_was_not_read(store: Store, callers: Callers) -> None:
    log = await create(store, callers, Caller(CID, CELERY, "task"))
    await enter(store, "w1")
    ownership = await claim(store, "w1")
    last = 1

    async def append(state: str) -> list[str]:
        """Append an event, and return the marks of all notices."""
        nonlocal last
        await log.append_as_owner(ownership, [message()], expected_last_id=last, fields={"state": state})
        last += 1
        notices = await store.connection.call("XRANGE", store.known_keys(CID).shard.notices, "-", "+")
        return [decode_fields(fields)["e"] for _, fields in notices]

    assert await append("running") == ["0"]
    assert await append("running") == ["0"]
    assert await append("finished") == ["0", "1"]
    assert await append("finished") == ["0", "1"]
    await store.connection.call(*await callers.reset_notice(CID))
    assert await append("running") == ["0", "1", "0"]


async def test_marking_a_deleted_conversation_leaves_no_key(store: Store, callers: Callers) -> None:
    await callers.mark_answered(CID)
    assert not await store.connection.call("EXISTS", store.known_keys(CID).caller)
