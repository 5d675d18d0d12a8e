"""Run a function over many items with bounded concurrency. Items are taken from the source as calls finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

AT_ONCE = 32

T = TypeVar("T")


async def for_each(
    items: AsyncIterable[T] | Iterable[T], act: Callable[[T], Awaitable[object]], *, at_once: int = AT_ONCE
) -> None:
    """Call a function with each item, at most `at_once` calls at a time, and wait until all are done.

    Raises:
        BaseException: the first error of a call or of the source. Calls in flight are cancelled and no more are
            started.
    """
    source = aiter(items if isinstance(items, AsyncIterable) else _each(items))
    turn = asyncio.Lock()

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
