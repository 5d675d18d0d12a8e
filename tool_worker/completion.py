"""Awaits work to its end even if the awaiting task is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

_T = TypeVar("_T")


async def wait_to_completion(work: Awaitable[_T]) -> _T:
    """Await work, such as a start in a thread; if cancelled meanwhile, wait for its end before raising."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
