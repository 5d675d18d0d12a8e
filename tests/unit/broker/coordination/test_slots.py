"""The places of a worker: an eighth of them for either side, whatever the other has taken."""

from __future__ import annotations

import asyncio

import pytest

from broker.coordination.slots import Slots


@pytest.mark.parametrize(("capacity", "kept"), [(1, 1), (7, 1), (16, 2), (2_000, 250)])
@pytest.mark.parametrize("greedy", [True, False])
def test_side_taking_everything_leaves_an_eighth(capacity: int, kept: int, greedy: bool) -> None:
    places = Slots(capacity)
    while places.count_free(is_first=greedy):
        places.take(is_first=greedy)
    assert places.used == capacity
    assert places.count_free(is_first=not greedy) == kept
    for _ in range(kept):
        places.take(is_first=not greedy)
    assert places.count_free(is_first=not greedy) == places.count_free(is_first=greedy) == 0


async def test_released_slot_goes_to_the_waiting_call() -> None:
    places = Slots(1)
    places.take(is_first=False)
    waiting = asyncio.create_task(places.wait(is_first=False))
    await asyncio.sleep(0)
    assert not waiting.done()
    places.release(is_first=False)
    assert await waiting == 1


async def test_a_place_is_held_as_long_as_it_is_needed() -> None:
    places = Slots(2)
    async with places.hold(is_first=True):
        assert places.used == 1
    assert places.used == 0
