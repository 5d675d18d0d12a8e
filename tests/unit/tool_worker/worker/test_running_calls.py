"""Calls of custom tools that are stopped: what a call still returns counts, what it does not is an error."""

from __future__ import annotations

import asyncio

import pytest

from broker.contract.events import Observation
from broker.contract.observations import ErrorObservation, ToolCallObservation
from broker.tools.custom_tools import ToolContext
from tool_worker.worker.steps.running_calls import RunningCalls


async def not_answered(_: str, __: int) -> bool:
    return False


@pytest.mark.parametrize("is_tidy", [True, False])
async def test_result_of_a_gracefully_stopped_call_is_kept(is_tidy: bool) -> None:
    begun = asyncio.Event()

    async def call() -> Observation:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not is_tidy:
                raise
        return ToolCallObservation(content="tidied up", name="tool")

    calls = RunningCalls(not_answered)
    running = asyncio.create_task(calls.run(ToolContext("conversation", 2), call()))
    await begun.wait()
    assert calls.stop("conversation", 2)
    observation = await running
    assert isinstance(observation, ToolCallObservation if is_tidy else ErrorObservation)
    assert observation.content == ("tidied up" if is_tidy else "The call was stopped.")
    assert not calls.stop("conversation", 2)
