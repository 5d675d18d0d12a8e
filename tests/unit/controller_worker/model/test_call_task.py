"""The task of a model call: its result, and what it continues with."""

import asyncio

from controller_worker.model.steps.call_task import CallTask


async def test_conversation_continues_in_the_task_of_its_call() -> None:
    seen: list[tuple[str, bool, list[str]]] = []
    kept: list[str] = []
    is_over = asyncio.Event()

    async def proceed() -> None:
        current = asyncio.current_task()
        assert current is not None
        seen.append((current.get_name(), task.is_running, list(kept)))
        is_over.set()

    async def answer() -> str:
        return "the answer"

    task = CallTask("model c1", proceed)
    task.start(answer, kept.append)
    await is_over.wait()
    assert seen == [("model c1", False, ["the answer"])]


async def test_cancelled_call_continues_nothing() -> None:
    kept: list[str] = []
    has_started = asyncio.Event()

    async def fail() -> None:
        raise AssertionError("a cancelled call must not continue its conversation")

    async def wait_for_ever() -> str:
        has_started.set()
        await asyncio.Event().wait()
        return "never"

    task = CallTask("model c1", fail)
    task.start(wait_for_ever, kept.append)
    await has_started.wait()
    running = [one for one in asyncio.all_tasks() if one.get_name() == "model c1"]
    assert task.cancel()
    await asyncio.wait(running)
    assert (kept, task.is_running) == ([], False)


async def test_cancelled_preparation_is_no_call() -> None:
    async def proceed() -> None:
        raise AssertionError("a cancelled preparation must not continue its conversation")

    task = CallTask("model c1", proceed)
    task.prepare(asyncio.Event().wait, lambda _: None)
    assert task.is_running
    assert task.cancel() is None
    assert not task.is_running
    task.start(asyncio.Event().wait, lambda _: None)
    assert task.cancel() is not None
    assert task.cancel() is None
