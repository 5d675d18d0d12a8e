"""When a conversation may begin, as the store counts it: parked, due, expired; and messages that it refuses."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from broker.contract.agent_state import AgentState
from broker.contract.events import ConversationCreated, ConversationStarted
from broker.contract.timing import StartWindow, Timing
from broker.coordination.membership import Membership
from broker.coordination.ownership import Owners, StartStatus
from broker.log.append_call import Appended, Duplicate
from broker.log.conversations import Conversations
from broker.log.event_log import EventLog
from broker.log.expiry import EXPIRED_CODE, expire
from broker.log.status import fold_status
from broker.runtime.errors import ConversationBusy, OwnershipLost
from broker.store.store import Store
from tests.broker_parts import CID, claim, enter, message, notified

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOUR = 3_600.0


async def plan(store: Store, start: StartWindow, **fields: object) -> EventLog:
    log = EventLog(store)
    created = ConversationCreated(conversation_id=CID, not_before=NOON, expires=NOON, **fields)  # type: ignore[arg-type]
    await log.create(created, [message()], key="begin", start=start)
    return log


async def set_back(store: Store, name: str) -> None:
    """Let a moment of the conversation have come long ago."""
    names = store.keys(CID)
    key, field = (names.shard.parked, "due_ms") if name == "parked" else (f"{names.shard.root}:expiring", "expires_ms")
    await store.connection.call("ZADD", key, 1, CID)
    await store.connection.call("HSET", names.meta, field, 1)


async def beat(store: Store, role: str = "controller") -> tuple[str, ...]:
    membership = Membership(store, f"{role}-9", role, ttl_seconds=3600.0)
    await membership.register()
    found = await membership.beat(1)
    return found.expired


async def test_a_conversation_that_begins_later_waits_in_the_store(store: Store) -> None:
    await plan(store, StartWindow(delay_seconds=HOUR))
    assert await notified(store) == []
    row = await Conversations(store).load_row(CID)
    assert (row.wait_reason, row.state) == ("scheduled", "loading")
    assert row.not_before is not None
    left = (row.not_before - row.created).total_seconds()
    assert left == pytest.approx(HOUR)
    await beat(store)
    assert await notified(store) == []
    await set_back(store, "parked")
    await beat(store)
    assert await notified(store) == [CID]


async def test_its_owner_hears_how_long_it_has_to_wait(store: Store) -> None:
    await plan(store, StartWindow(delay_seconds=HOUR))
    await enter(store, "w1")
    ownership = await claim(store, "w1")
    owners = Owners(store)
    left = await owners.check_start(ownership)
    assert isinstance(left, float)
    assert HOUR - 60 < left <= HOUR
    await set_back(store, "parked")
    assert await owners.check_start(ownership) is StartStatus.DUE
    await owners.release(ownership, seen_id=2)
    with pytest.raises(OwnershipLost):
        await owners.check_start(ownership)


async def test_a_conversation_without_a_time_is_due(store: Store) -> None:
    await plan(store, StartWindow(limit_seconds=HOUR))
    assert await notified(store) == [CID]
    await enter(store, "w1")
    assert await Owners(store).check_start(await claim(store, "w1")) is StartStatus.DUE


async def test_one_that_has_not_begun_in_time_is_ended_once(store: Store) -> None:
    log = await plan(store, StartWindow(limit_seconds=HOUR))
    assert await beat(store) == ()
    await set_back(store, "expiring")
    assert await beat(store, "tool") == ()  # a tool worker writes into no log
    assert await beat(store) == (CID,)
    assert await store.connection.call("ZSCORE", f"{store.all_shards[0].root}:expiring", CID)  # that worker may die
    for _ in range(2):
        await expire(log, [CID, "unknown"])
    assert await beat(store) == ()
    events = await log.read(CID)
    assert [event.kind for event in events][2:] == ["observation.agent_state_changed"]
    assert fold_status(events).is_terminal
    row = await Conversations(store).load_row(CID)
    assert (row.state, row.fields["error_code"]) == (AgentState.ERROR, EXPIRED_CODE)


async def test_one_that_has_begun_does_not_expire(store: Store) -> None:
    log = await plan(store, StartWindow(limit_seconds=HOUR))
    await enter(store, "w1")
    ownership = await claim(store, "w1")
    await log.append_as_owner(ownership, [ConversationStarted()], expected_last_id=2, fields={"planned": "begun"})
    await set_back(store, "expiring")
    await expire(log, [CID])
    assert await log.load_last_id(CID) == 3
    assert await beat(store) == ()


async def test_its_owner_hears_that_it_has_expired(store: Store) -> None:
    await plan(store, StartWindow(limit_seconds=HOUR))
    await enter(store, "w1")
    ownership = await claim(store, "w1")
    await set_back(store, "expiring")
    assert await Owners(store).check_start(ownership) is StartStatus.EXPIRED


async def test_a_conversation_at_work_refuses_messages_if_it_says_so(store: Store) -> None:
    log = EventLog(store)
    await log.create(ConversationCreated(conversation_id=CID, double_texting="reject"), [message()], key="begin")
    with pytest.raises(ConversationBusy) as refused:
        await log.append(CID, [message()], key="a", condition="message:")
    assert (refused.value.code, refused.value.retryable) == ("busy", True)
    assert await log.load_last_id(CID) == 2
    assert isinstance(await log.append(CID, [message()], key="b", condition="message:enqueue"), Appended)
    await enter(store, "w1")
    ownership = await claim(store, "w1")
    await log.append_as_owner(ownership, [], expected_last_id=3, fields={"busy": ""})
    assert isinstance(await log.append(CID, [message()], key="a", condition="message:"), Appended)
    # Of two messages to an agent at rest, the second comes to one at work, though no worker has seen the first.
    with pytest.raises(ConversationBusy):
        await log.append(CID, [message()], key="c", condition="message:")
    assert isinstance(await log.append(CID, [message()], key="a", condition="message:"), Duplicate)


async def test_one_message_may_ask_to_be_refused(store: Store) -> None:
    log = EventLog(store)
    await log.create(ConversationCreated(conversation_id=CID), [message()], key="begin")
    assert isinstance(await log.append(CID, [message()], condition="message:"), Appended)
    with pytest.raises(ConversationBusy):
        await log.append(CID, [message()], condition="message:reject")


async def test_a_conversation_that_waits_to_begin_is_not_at_work(store: Store) -> None:
    log = await plan(store, StartWindow(delay_seconds=HOUR), double_texting="reject")
    for _ in range(2):
        assert isinstance(await log.append(CID, [message()], condition="message:"), Appended)


def test_times_become_durations() -> None:
    assert Timing().to_start_window(NOON) is None
    assert Timing(delay_seconds=0.0).to_start_window(NOON) is None
    assert Timing(delay_seconds=5.0, expires=60.0).to_start_window(NOON) == StartWindow(5.0, 60.0)
    assert Timing(not_before=NOON).to_start_window(NOON) is None
    assert Timing(expires=NOON).to_start_window(NOON) == StartWindow(None, 0.0)
    later = NOON.replace(hour=13)
    assert Timing(not_before=later, delay_seconds=5.0).to_start_window(NOON) == StartWindow(HOUR, None)
    assert Timing(delay_seconds=5.0, expires=60.0).after(10.0) == Timing(delay_seconds=0.0, expires=50.0)
