"""A thread for one call of somebody else's code.

Holds: a call begins at once however many others block, and one that never ends takes no thread that the loop needs for
its own work, nor keeps the process from ending; whatever the code raises is an ordinary exception for who waits.
Does not: stop the thread when nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def in_own_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a new thread and return what it returns."""
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
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(_settle, answer, found, error)

    threading.Thread(target=work, name=f"call of {getattr(function, '__qualname__', function)}", daemon=True).start()
    return await answer


def _settle(answer: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    if answer.done():  # nobody waits any more
        return
    if error is None:
        answer.set_result(found)
    elif isinstance(error, StopIteration):  # no future can hold one
        answer.set_exception(RuntimeError(f"StopIteration: {error}"))
    else:
        answer.set_exception(error)
