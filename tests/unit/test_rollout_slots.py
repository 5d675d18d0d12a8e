"""How busy the slots of the engine are in `benchmarks.rollout_kills`."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.rollout_kills import Slots, measure_busy


def test_slots_count_while_all_can_be_busy() -> None:
    spans = [(0.0, 10.0), (2.0, 6.0), (7.0, 10.0), (10.0, 12.0)]
    assert measure_busy(spans, 2) == pytest.approx(15 / 16)  # from 2 to 10, with one of two missing from 6 to 7
    assert measure_busy(spans, 2, [6.0]) == 1.0  # a kill at 6 leaves out what follows
    assert measure_busy(spans, 3) == 0.0


async def test_a_free_slot_is_busy_while_a_request_waits() -> None:
    slots = Slots(1)
    order: list[int] = []

    async def reply(number: int) -> None:
        async with slots.hold():
            order.append(number)
            await asyncio.sleep(0)

    gone, *rest = [asyncio.create_task(reply(number)) for number in range(4)]
    await gone
    rest[1].cancel()  # its conversation has ended
    await asyncio.gather(*rest, return_exceptions=True)
    assert order == [0, 1, 3]
    assert [until for _, until in slots.replies[:-1]] == [since for since, _ in slots.replies[1:]]
    assert measure_busy(slots.replies, 1) == 1.0
    assert measure_busy(slots.shown, 1) < 1.0
    async with asyncio.timeout(10), slots.hold():
        pass
