"""Blocking twins of asynchronous methods: each is one line, with the same name, parameters and types.

    class Twin(Blocking[AsyncThing]):
        ask = blocking(AsyncThing.ask)
        watch = blocking_iterator(AsyncThing.watch)

The asynchronous object lives in an event loop of another thread (anyio's portal), which ends with the twin.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from anyio.from_thread import BlockingPortal, start_blocking_portal

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
S = TypeVar("S")

_END = object()


class LoopThread:
    """An event loop in another thread, started when it is first used."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None

    def call(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run a coroutine function in the loop and return its result. Must not be called in the loop's own thread."""
        if self._portal is None:
            self._portal = self._stack.enter_context(start_blocking_portal())
        result: R = self._portal.call(work)
        return result

    def close(self) -> None:
        """End the loop and its thread. Idempotent."""
        self._portal = None
        self._stack.close()


class Blocking(Generic[A]):
    """An object whose asynchronous `twin` does the work, in `loop`."""

    def __init__(self, twin: A, loop: LoopThread) -> None:
        self.twin = twin
        self.loop = loop


def blocking(method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], R]:
    """Return the blocking twin of an asynchronous method."""

    @functools.wraps(method)
    def call(self: Blocking[S], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.loop.call(functools.partial(method, self.twin, *args, **kwargs))

    return call


def blocking_iterator(
    method: Callable[Concatenate[S, P], AsyncGenerator[R]],
) -> Callable[Concatenate[Any, P], Iterator[R]]:
    """Return the blocking twin of an asynchronous generator, an iterator."""

    @functools.wraps(method)
    def iterate(self: Blocking[S], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        items, call = method(self.twin, *args, **kwargs), self.loop.call

        async def next_one() -> R | object:
            return await anext(items, _END)

        try:
            while (item := call(next_one)) is not _END:
                yield cast("R", item)
        finally:
            call(items.aclose)

    return iterate
