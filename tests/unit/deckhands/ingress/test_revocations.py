"""How many revocations an ingress takes up at once, whatever is broadcast."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from celery import Celery

from deckhands.ingress.tasks import MAX_BROADCASTS, IngressTasks
from tests.polling import until


class Runs:
    """Runs whose revocation takes until it is allowed to end."""

    def __init__(self) -> None:
        self.under_way: list[str] = []
        self.most = 0
        self.is_allowed = asyncio.Event()

    async def revoke(self, task_id: str) -> None:
        self.under_way.append(task_id)
        self.most = max(self.most, len(self.under_way))
        await self.is_allowed.wait()
        self.under_way.remove(task_id)
        if task_id == "0-0":
            raise ValueError("spoilt")


class OneIngress:
    def __init__(self) -> None:
        self.runs = Runs()

    async def wait_until_open(self) -> None:
        return


class ThisLoop:
    """Starts requested work on the loop of the test."""

    def __init__(self) -> None:
        self.begun: list[Future[Any]] = []

    def start_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        self.begun.append(asyncio.run_coroutine_threadsafe(coroutine, asyncio.get_running_loop()))
        return self.begun[-1]


async def test_broadcast_flood_is_taken_gradually_then_refused() -> None:
    ingress: Any = OneIngress()
    loop: Any = ThisLoop()
    results: Any = None  # a broadcast needs none
    tasks = IngressTasks(Celery("ingress", set_as_current=False), ingress, loop, results)
    taken = [tasks.revoke([f"{n}-{number}" for number in range(50)]) for n in range(MAX_BROADCASTS + 1)]
    assert taken == [True] * MAX_BROADCASTS + [False]
    await until(lambda: ingress.runs.under_way, what="the first revocations")
    ingress.runs.is_allowed.set()
    await until(lambda: all(each.done() for each in loop.begun), what="the end of all")
    assert [each.exception() for each in loop.begun] == [None] * MAX_BROADCASTS
    assert 0 < ingress.runs.most <= 4
    assert tasks.revoke(["again"])
    await until(loop.begun[-1].done, what="one more")
