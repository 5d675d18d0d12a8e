"""The same for many: bounded at once, all of them, and the first error ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from deckhands.client.many import for_each


async def test_no_more_than_some_are_under_way() -> None:
    taken = under_way = most = 0
    done: list[int] = []

    async def source() -> AsyncIterator[int]:
        nonlocal taken
        for number in range(100):
            taken += 1
            yield number

    async def act(number: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        assert taken <= len(done) + 4
        await asyncio.sleep(0)
        under_way -= 1
        done.append(number)

    await for_each(source(), act, at_once=4)
    assert (sorted(done), most) == (list(range(100)), 4)


@pytest.mark.parametrize("place", ["act", "source"])
async def test_the_first_error_ends_it(place: str) -> None:
    done: list[int] = []

    async def source() -> AsyncIterator[int]:
        for number in range(100):
            if place == "source" and number == 3:
                raise KeyError("broken")
            yield number

    async def act(number: int) -> None:
        if place == "act" and number == 3:
            raise KeyError("broken")
        await asyncio.sleep(0)
        done.append(number)

    with pytest.raises(KeyError, match="broken"):
        await for_each(source(), act, at_once=2)
    assert len(done) <= 4
