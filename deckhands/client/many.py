"""The same for many: a bounded number at once, taken from a source only as fast as they are done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

AT_ONCE = 32

T = TypeVar("T")


async def for_each(
    items: AsyncIterable[T] | Iterable[T], act: Callable[[T], Awaitable[object]], *, at_once: int = AT_ONCE
) -> None:
    """Call a function with each item, with at most `at_once` calls under way, and wait until all are done.

    Raises:
        BaseException: the first that a call or the source raises; the calls under way are cancelled, and no more begin.
    """
    source, turn = aiter(items if isinstance(items, AsyncIterable) else _each(items)), asyncio.Lock()

    async def work() -> None:
        while True:
            async with turn:
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    return
            await act(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _each(items: Iterable[T]) -> AsyncIterator[T]:
    for item in items:
        yield item
