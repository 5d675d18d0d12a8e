"""The simulation's own machinery: time, processes, death. Its kills have the effect of SIGKILL."""

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest

from broker.testing.manual_clock import ManualClock
from tests.simulation.virtual_loop import RanDry, SimulatedProcess, VirtualLoop, current_process


def new_loop(seed: int = 0) -> VirtualLoop:
    return VirtualLoop(ManualClock(), Random(seed))


def start(loop: VirtualLoop, process: SimulatedProcess, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return loop.create_task(work, context=process.context)


def test_an_hour_passes_at_once() -> None:
    loop = new_loop()

    async def world() -> float:
        await asyncio.sleep(3600)
        return loop.time()

    assert loop.run(world()) == 3600


def test_killed_process_never_returns_and_its_timers_vanish() -> None:
    loop, noted = new_loop(), []

    async def work(process: SimulatedProcess) -> None:
        try:
            loop.call_later(1, noted.append, "timer")
            start(loop, process, another())
            process.kill()
            await asyncio.sleep(0)
            noted.append("continued")
        finally:
            noted.append("finally")

    async def another() -> None:
        noted.append("task")

    async def world() -> list[str]:
        process = SimulatedProcess("victim")
        start(loop, process, work(process))
        await asyncio.sleep(10)
        return list(noted)

    assert loop.run(world()) == []


def test_stopped_process_continues_with_what_became_due() -> None:
    loop, noted = new_loop(), []

    async def work(process: SimulatedProcess) -> None:
        loop.call_later(1, lambda: noted.append(("timer", loop.time())))
        process.stop()
        loop.call_later(5, process.resume, context=loop.world.context)
        await asyncio.sleep(0)
        noted.append(("continued", loop.time()))

    async def world() -> None:
        process = SimulatedProcess("sleeper")
        await start(loop, process, work(process))
        await asyncio.sleep(1)

    loop.run(world())
    assert noted == [("continued", 5.0), ("timer", 5.0)]


def test_callbacks_keep_process_order_and_seed_shuffles_processes() -> None:
    def order(seed: int) -> list[tuple[str, int]]:
        loop, noted = new_loop(seed), []

        async def work(name: str) -> None:
            for number in range(5):
                noted.append((name, number))
                await asyncio.sleep(0)

        async def world() -> None:
            await asyncio.gather(*(start(loop, SimulatedProcess(name), work(name)) for name in "abc"))

        loop.run(world())
        return noted

    for name in "abc":
        assert [number for who, number in order(1) if who == name] == [0, 1, 2, 3, 4]
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(10)}) > 5


def test_everything_that_is_started_belongs_to_its_process() -> None:
    loop, noted = new_loop(), []

    async def child() -> None:
        noted.append(current_process().name)

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(child())
        await asyncio.to_thread(lambda: noted.append(current_process().name))
        loop.call_soon(lambda: noted.append(current_process().name))
        await asyncio.sleep(0)

    async def world() -> None:
        await start(loop, SimulatedProcess("mine"), work())
        noted.append(current_process().name)

    loop.run(world())
    assert noted == ["mine", "mine", "mine", "world"]


def test_deadlocked_simulation_says_so() -> None:
    loop = new_loop()

    async def world() -> None:
        await loop.create_future()

    with pytest.raises(RanDry):
        loop.run(world())
