"""Polling for the effects of other processes: the only place in the tests that polls."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable
from typing import Any

POLL_SECONDS = 0.02


def unhurried(seconds: float) -> float:
    """Return the limit for work that takes an idle machine so many seconds: longer while this one is busy."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


async def until(
    condition: Callable[[], Any], *, limit: float = 30.0, what: str = "condition", every: float = POLL_SECONDS
) -> None:
    """Wait until a condition, sync or async, holds; `TimeoutError` names it after `limit` seconds of an idle machine.

    Args:
        every: seconds between two looks; more for a condition that costs much.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(unhurried(limit)):
            while True:
                found = condition()
                if inspect.isawaitable(found):
                    found = await found
                if found:
                    return
                look_again = asyncio.Event()
                loop.call_later(every, look_again.set)
                await look_again.wait()
    except TimeoutError:
        raise TimeoutError(f"no {what} within {limit} s") from None
