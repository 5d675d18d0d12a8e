"""Appends through a proxy that swallows replies: each event is there exactly once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from broker.contract.actions import MessageAction
from broker.coordination.action_streams import ActionDelivery, ActionQueue
from broker.coordination.ownership import ClaimFailure, Owners
from broker.log.append_call import Appended, Duplicate
from broker.log.event_log import EventLog
from broker.store.store import open_store
from tests.broker_parts import CID, act, begin, command, enter, message, output, queue
from tests.stores import LossyWire

APPENDS = 300
ACTIONS = 60
SWALLOWED = 0.05
SEED = 20_260_101


def _loses(random_: random.Random) -> Callable[[bytes], bool]:
    return lambda _: random_.random() < SWALLOWED


def _keeps(_: bytes) -> bool:
    return False


async def test_300_appends_with_5_percent_of_the_replies_swallowed(lossy_wire: LossyWire) -> None:
    store = await open_store(lossy_wire.url)
    log = await begin(store)
    lossy_wire.swallow = _loses(random.Random(SEED))
    outcomes = [await log.append(CID, [message(str(n))]) for n in range(APPENDS)]
    lossy_wire.swallow = _keeps
    # The reply of a greeting is swallowed now and then, too.
    assert 5 <= sum(isinstance(outcome, Duplicate) for outcome in outcomes) <= lossy_wire.swallowed
    ids = [outcome.first_id for outcome in outcomes if isinstance(outcome, Appended | Duplicate)]
    assert ids == list(range(2, APPENDS + 2))
    events = await log.read(CID)
    assert [event.content for event in events if isinstance(event, MessageAction)] == [str(n) for n in range(APPENDS)]
    await store.aclose()


async def test_many_at_once_over_one_connection(lossy_wire: LossyWire) -> None:
    store = await open_store(lossy_wire.url)
    log = await begin(store)
    lossy_wire.swallow = _loses(random.Random(SEED))
    for batch in range(APPENDS // 10):
        await asyncio.gather(*(log.append(CID, [message(f"{batch}.{n}")]) for n in range(10)))
    lossy_wire.swallow = _keeps
    assert lossy_wire.swallowed >= 1
    events = [event for event in await log.read(CID) if isinstance(event, MessageAction)]
    assert sorted(event.content for event in events) == sorted(
        f"{batch}.{n}" for batch in range(APPENDS // 10) for n in range(10)
    )
    await store.aclose()


async def test_an_owner_and_a_tool_worker_behind_the_same_wire(lossy_wire: LossyWire) -> None:
    store = await open_store(lossy_wire.url)
    log = await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    ownership, action_id = await act(store, "w1")
    reader = queue(store, "t1", node="n1")
    lossy_wire.swallow = _loses(random.Random(SEED))
    for _ in range(ACTIONS):
        delivery = await _next(reader, action_id)
        await reader.claim(delivery)
        await log.append_observation(CID, output(action_id), worker_id="t1", place=delivery.location)
        (found,) = (await log.read_new(ownership, after=action_id)).events
        assert found.cause == action_id
        decided = await log.append_as_owner(ownership, [command()], expected_last_id=found.id, dispatch=[0])
        assert isinstance(decided, Appended | Duplicate)
        action_id = decided.last_id
    lossy_wire.swallow = _keeps
    assert lossy_wire.swallowed >= 5
    assert [event.id for event in await log.read(CID)] == list(range(1, 2 * ACTIONS + 3))
    await reader.aclose()
    await store.aclose()


async def _next(reader: ActionQueue, action_id: int) -> ActionDelivery:
    """Read until the action comes; after a lost reply, entries that are settled may come again."""
    async with asyncio.timeout(60):
        while True:
            for delivery in await reader.read(limit=10):
                if delivery.action_id == action_id:
                    assert isinstance(delivery, ActionDelivery)
                    return delivery


async def test_a_claim_whose_reply_was_swallowed_is_resumed(lossy_wire: LossyWire) -> None:
    store = await open_store(lossy_wire.url)
    await begin(store)
    await enter(store, "w1")
    losses = iter([True])
    lossy_wire.swallow = lambda _: next(losses, False)
    owners = Owners(store)
    assert await owners.claim(CID, "w1") is ClaimFailure.YOURS
    resumed = await owners.resume_claim(CID, "w1")
    outcome = await EventLog(store).append_as_owner(resumed.ownership, [message()], expected_last_id=1)
    assert outcome == Appended(2, 2)
    await store.aclose()
