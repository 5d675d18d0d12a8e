"""Threads for code that may block forever, such as an operator's class or a provider's library.

Holds: callers can be cancelled, and their wait is limited. A thread that never ends does not delay the event loop, the
loop's own threads, or the exit of the process. The number of such threads is bounded.
Does not: stop a thread; Python cannot.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context
from typing import Any, TypeVar, TypeVarTuple, Unpack

from controller_worker.providers.errors import LLMConfigError

MAX_STUCK = 64
"""The maximum number of threads without a waiting caller."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _DaemonThreads(Executor):
    """Starts one daemon thread per call, so that the process can exit without waiting for it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `Executor.submit`."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  (it is raised where the result is awaited)
                future.set_exception(error)

        future.set_running_or_notify_cancel()
        threading.Thread(target=work, daemon=True).start()
        return future


class LimitedThreads:
    """The threads of one worker."""

    def __init__(self) -> None:
        self._threads = _DaemonThreads()
        self._lock = threading.Lock()
        self._stuck = 0

    async def run(self, function: Callable[[Unpack[Ts]], T], *arguments: *Ts, what: str, limit_seconds: float) -> T:
        """Call a function in a thread and return its result, or raise its error.

        Args:
            what: the subject of the error text.

        Raises:
            LLMConfigError: the call exceeded its time limit, or too many earlier calls are still running.
        """
        if self._stuck >= MAX_STUCK:
            raise LLMConfigError(
                f"{what} cannot start: {self._stuck} earlier calls are still running.",
                remedy="Restart the controller worker, and look in its log for the blocked calls.",
            )
        has_ended = is_abandoned = False
        context = copy_context()

        def count_end() -> None:
            nonlocal has_ended
            with self._lock:
                has_ended = True
                self._stuck -= is_abandoned

        def work() -> T:
            try:
                return context.run(function, *arguments)
            finally:
                count_end()

        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            async with asyncio.timeout(limit_seconds):
                return await running
        except TimeoutError as error:
            if not running.cancelled():
                raise
            raise LLMConfigError(f"{what} did not finish within {limit_seconds:g} s.") from error
        finally:
            if running.cancelled():
                with self._lock:
                    is_abandoned = not has_ended
                    self._stuck += is_abandoned
