"""Steps around an action: stopped calls, and actions that share a number."""

from __future__ import annotations

import asyncio

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import EventSource, Observation, ToolCallMetadata
from broker.contract.file_events import FileReadAction
from broker.contract.observations import ErrorObservation, ToolCallObservation
from broker.runtime.clock import SystemClock
from broker.tools.custom_tools import ToolContext
from tool_worker.worker.steps.action_run import compute_fingerprint
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


def test_the_same_content_has_the_same_fingerprint() -> None:
    call = ToolCallMetadata(function_name="execute_bash", tool_call_id="call-2", reply_id=6)
    again = {"thought": "again", "timestamp": SystemClock().now(), "tool_call_metadata": call}
    action = CmdRunAction(command="ls", source=EventSource.AGENT)
    assert compute_fingerprint(action) == compute_fingerprint(action.model_copy(update=again))


def test_other_content_has_another() -> None:
    found = [CmdRunAction(command="ls"), CmdRunAction(command="ls", timeout=3), CmdRunAction(command="ls\ud800")]
    fingerprints = {compute_fingerprint(action) for action in (*found, FileReadAction(path="ls"))}
    assert len(fingerprints) == 4
    assert all(len(one) == 16 and one.isalnum() for one in fingerprints)


def test_a_call_with_other_arguments_has_another_idempotency_key() -> None:
    one, other = (ToolContext("conversation", 7, fingerprint=fingerprint) for fingerprint in ("abc", "def"))
    assert one.idempotency_key == "conversation-7-abc"
    assert other.idempotency_key != one.idempotency_key
    assert ToolContext("c", 1).idempotency_key != ToolContext("c", 11).idempotency_key
