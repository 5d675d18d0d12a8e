"""Runs one call of foreign code in a thread of its own.

Holds: a call starts immediately, however many others block. A call that never ends takes no thread of the loop's pool
and does not keep the process alive. Every exception of the code reaches the caller as an ordinary exception.
Does not: stop the thread when its caller is cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def in_own_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a new thread and return its result."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        found, error = None, None
        try:
            found = context.run(function, *arguments)
        except Exception as raised:  # noqa: BLE001  (it is raised where the call is waited for)
            error = raised
        except BaseException as raised:  # noqa: BLE001  (SystemExit would end the waiting task)
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(_settle, answer, found, error)

    threading.Thread(target=work, name=f"call of {getattr(function, '__qualname__', function)}", daemon=True).start()
    return await answer


def _settle(answer: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    if answer.done():  # the caller was cancelled
        return
    if error is None:
        answer.set_result(found)
    elif isinstance(error, StopIteration):  # a future cannot hold one
        answer.set_exception(RuntimeError(f"StopIteration: {error}"))
    else:
        answer.set_exception(error)
