"""The thread with the loop of a worker, as the threads of Celery use it while the worker stops."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any

import pytest

from broker.celery.bootstep import LoopThread


class Brief:
    """A service that ends when its only call asks for it."""

    def __init__(self) -> None:
        self.ends: asyncio.Event = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        await self.ends.wait()

    def report(self) -> Mapping[str, Any]:
        return {}

    async def end(self) -> str:
        self.ends.set()
        return await asyncio.Event().wait() and "never"


def test_work_for_a_loop_that_has_ended_is_cancelled() -> None:
    thresholds = gc.get_threshold()
    service = Brief()
    thread = LoopThread(service)
    thread.start()
    try:
        with pytest.raises(CancelledError):
            thread.call(service.end())  # still running when the loop ends
        thread.stop()
        with pytest.raises(CancelledError):
            thread.call(service.end())
    finally:
        gc.set_threshold(*thresholds)
