"""A conversation that is stopped while a custom tool runs: the call is answered at once, and the tool itself ends."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from broker.contract.events import Observation
from broker.contract.observations import ErrorObservation
from broker.tools.custom_tools import ToolContext
from tests.faults.harness import FaultCluster
from tests.faults.test_offered_tool_kills import answers, calling
from tests.integration.test_mcp import offering, program
from tests.polling import unhurried, until
from tool_worker.worker.steps.running_calls import RunningCalls
from tool_worker.workspace.launch.host_folder import HostFolder

STOP_SECONDS = 1.0
TOOLS = {"DECKHANDS_TOOLS": "tests.example_tools:linger,tests.example_tools:grind"}


def sleeping() -> set[str]:
    """Return the arguments of the machine's live `sleep` programs."""
    commands = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    return {command[1] for command in commands if command[:1] == ["sleep"]}


@pytest.mark.parametrize("tool", ["linger", "grind"])
async def test_a_tool_whose_conversation_is_stopped_ends(cluster: FaultCluster, tool: str) -> None:
    trace = cluster.root / "trace"
    cluster.start_controller()
    # The thread runs on another node than the workspace's, where no order about the workspace comes to.
    cluster.start_tool("far", DECKHANDS_POOLS="gpu", DECKHANDS_NODE="far", **TOOLS)
    cluster.start_tool("near", **TOOLS)
    (conversation_id,) = await cluster.submit(calling(tool, trace=str(trace)), tools=[tool])
    await cluster.until(lambda: lines(trace) == ["begun"], what="the call")
    await cluster.client.cancel(conversation_id)
    await cluster.settle([conversation_id])
    (answer,) = await answers(cluster, conversation_id)
    assert isinstance(answer, ErrorObservation)
    await cluster.until(lambda: lines(trace) == ["begun", "stopped"], what="end of the tool")
    # The tool's own answer comes too late for anybody.
    assert len(await answers(cluster, conversation_id)) == 1


async def test_nothing_runs_any_more_for_a_conversation_that_is_stopped(cluster: FaultCluster) -> None:
    cluster.start_controller()
    cluster.start_tool()
    marks = [f"{number}.{os.getpid()}" for number in range(61, 65)]
    earlier = f"sleep {marks[0]} & echo"
    tree = f"setsid sleep {marks[1]} & trap '' INT TERM; (trap '' INT; sleep {marks[2]} & sleep {marks[3]}); echo never"
    calls = [{"name": "execute_bash", "arguments": {"command": command}} for command in (earlier, tree)]
    (conversation_id,) = await cluster.submit([{"tool_calls": [call]} for call in calls])
    await cluster.until(lambda: sleeping() >= set(marks), what="the programs")
    began = asyncio.get_running_loop().time()
    await cluster.client.cancel(conversation_id)
    await cluster.until(lambda: not sleeping() & set(marks), what="their end")
    took = asyncio.get_running_loop().time() - began
    await cluster.settle([conversation_id])
    kinds = [event.kind for event in await cluster.client.events(conversation_id)]
    assert kinds[-3:] == ["action.change_agent_state", "observation.error", "observation.agent_state_changed"]
    assert took < unhurried(STOP_SECONDS)
    host = HostFolder(cluster.root / "n", conversation_id)
    await cluster.until(lambda: not host.is_alive, what="the end of the host")


async def test_a_call_of_an_mcp_server_is_stopped_there_too(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    answered = asyncio.Event()

    async def is_answered(conversation_id: str, action_id: int) -> bool:
        assert (conversation_id, action_id) == ("conversation-1", 3)
        return answered.is_set()

    calls = RunningCalls(is_answered)
    async with offering(program(), tmp_path) as example:
        call = asyncio.create_task(
            calls.run(ToolContext("conversation-1", 3), example.call("linger", trace=str(trace)))
        )
        await until(lambda: lines(trace) == ["begun"])
        answered.set()
        stopped = await call
        assert isinstance(stopped, ErrorObservation)
        assert stopped.error_id == "cancelled"
        await until(lambda: lines(trace) == ["begun", "stopped"])
        # And the server serves on.
        assert (await example.result("echo", text="well"))["content"][0]["text"] == "well"


async def test_order_stops_a_call_but_an_unlistening_one_continues() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def stubborn() -> Observation:
        begun.set()
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue
        return ErrorObservation(content="too late")

    async def never(conversation_id: str, action_id: int) -> bool:
        return False

    calls = RunningCalls(never, stop_seconds=0.05)
    assert not calls.stop("conversation-1", 1)
    running = asyncio.create_task(calls.run(ToolContext("conversation-1", 1), stubborn()))
    await begun.wait()
    assert calls.stop("conversation-1", 1)
    assert (await running).content == "The call was stopped."
    assert not calls.stop("conversation-1", 1)
    may_end.set()


def lines(trace: Path) -> list[str]:
    return trace.read_text().splitlines() if trace.exists() else []
