"""Deaths of workers: which of them count against an action."""

from __future__ import annotations

import pytest

from broker.coordination.action_streams import ActionClaimed, ActionReclaimed
from broker.store.store import Store
from tests.broker_parts import CID, act, begin, enter, lapse, output, queue, take


async def attempts(store: Store, acting: list[bool]) -> list[int]:
    """Let a worker die for each item, with the action acting or only waiting, and return what each next one gets."""
    await begin(store)
    await enter(store, "w1")
    undertaker = await enter(store, "t0", node="n1")
    await enter(store, "t1", node="n1")
    await act(store, "w1")
    reader = queue(store, "t1", node="n1")
    assert await reader.claim(await take(reader)) == ActionClaimed(1)
    told = []
    for number in range(1, len(acting) + 1):
        await lapse(store, f"t{number}")
        await undertaker.beat(number)
        await reader.aclose()
        await enter(store, f"t{number + 1}", node="n1")
        reader = queue(store, f"t{number + 1}", node="n1")
        delivery = await take(reader)
        claimed = await reader.claim(delivery)
        assert isinstance(claimed, ActionReclaimed)
        told.append(claimed.attempt)
        assert await reader.mark(delivery, is_acting=True)
        if number < len(acting) and not acting[number]:
            assert await reader.mark(delivery, is_acting=False)
    await reader.aclose()
    return told


@pytest.mark.parametrize(
    ("acting", "told"),
    [
        ([True, True, True, True], [2, 3, 4, 5]),
        ([True, False, False, False], [2, 2, 2, 2]),
        ([True, False, True, False, True], [2, 2, 3, 3, 4]),
    ],
)
async def test_the_first_death_counts_and_then_those_with_a_mark(
    store: Store, acting: list[bool], told: list[int]
) -> None:
    assert await attempts(store, acting) == told


async def test_only_who_holds_an_action_marks_it(store: Store) -> None:
    log = await begin(store)
    await enter(store, "w1")
    await enter(store, "t1", node="n1")
    _, action_id = await act(store, "w1")
    holder, other = queue(store, "t1", node="n1"), queue(store, "t2", node="n1")
    delivery = await take(holder)
    assert not await holder.mark(delivery, is_acting=True)
    await holder.claim(delivery)
    assert not await other.mark(delivery, is_acting=True)
    assert await holder.mark(delivery, is_acting=True)
    await log.append_observation(CID, output(action_id), worker_id="t1", place=delivery.location)
    assert not await holder.mark(delivery, is_acting=False)
    left = await store.connection.call("HGETALL", store.keys(CID).once)
    assert left == [b"create:begin", b"1:1", b"o:2", b"3:3"]
    for reader in (holder, other):
        await reader.aclose()
