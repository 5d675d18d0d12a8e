"""Code that may block for ever, such as an operator's class or a provider's library: in separate threads.

Holds: who waits for it can be cancelled and waits for a limited time; a thread that never ends holds up neither the
event loop, nor the loop's own threads, nor the end of the process; there is a bound on how many such threads there are.
Does not: end a thread; nothing can.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import TypeVar, TypeVarTuple, Unpack

from controller_worker.llm.errors import LLMConfigError

MAX_STUCK = 64
"""How many threads may run for which nobody waits any more."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LimitedThreads:
    """The threads of one worker."""

    def __init__(self) -> None:
        self._stuck = 0

    async def run(self, function: Callable[[Unpack[Ts]], T], *arguments: *Ts, what: str, limit_seconds: float) -> T:
        """Call a function in a thread and return its result, or raise its error.

        Args:
            what: the subject of the error's text.

        Raises:
            LLMConfigError: it has not ended in time, or too many others have not.
        """
        if self._stuck >= MAX_STUCK:
            raise LLMConfigError(
                f"{what} cannot be made: {self._stuck} others have not been made in time.",
                remedy="Restart the controller worker, and see its log for what blocks.",
            )
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        context, is_awaited = copy_context(), True

        def settle(give: Callable[[], None]) -> None:
            if is_awaited:
                give()
            else:
                self._stuck -= 1

        def call() -> None:
            try:
                give = partial(result.set_result, context.run(function, *arguments))
            except BaseException as error:  # noqa: BLE001  (it is raised where the result is wanted)
                give = partial(result.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(settle, give)

        threading.Thread(target=call, name=what, daemon=True).start()
        try:
            async with asyncio.timeout(limit_seconds):
                return await result
        except TimeoutError as error:
            if not result.cancelled():
                raise
            raise LLMConfigError(f"{what} was not made within {limit_seconds:g} s.") from error
        finally:
            if result.cancelled():
                is_awaited = False
                self._stuck += 1
