"""A tool worker killed while a cell runs: the cell continues, and its result is collected once."""

from __future__ import annotations

import os
from typing import Any

import pytest

from broker.contract.events import Observation
from broker.contract.session_events import IPythonRunCellObservation
from tests.faults.harness import FaultCluster

POOLS = {"DECKHANDS_POOLS": "bash,ipython"}


def cells(*codes: str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [
        {"tool_calls": [{"name": "execute_ipython_cell", "arguments": {"code": code}}]} for code in codes
    ]
    return [*turns, {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}]


async def answers(cluster: FaultCluster, conversation_id: str) -> list[str]:
    """The first line of each cell's one answer."""
    events = await cluster.client.events(conversation_id)
    texts = []
    for action in [event for event in events if event.kind == "action.run_ipython"]:
        (answer,) = [event for event in events if isinstance(event, Observation) and event.cause == action.id]
        assert isinstance(answer, IPythonRunCellObservation), answer
        texts.append(answer.content.splitlines()[0])
    return texts


async def test_a_running_cell_is_collected_by_the_next_worker(cluster: FaultCluster) -> None:
    trace, gate = cluster.root / "trace", cluster.root / "gate"
    os.mkfifo(gate)
    cluster.start_controller()
    cluster.start_tool("victim", **POOLS)
    slow = f"print('in', file=open({str(trace)!r}, 'a'), flush=True); open({str(gate)!r}).read(); x = 41; print('out')"
    (conversation_id,) = await cluster.submit(cells(slow, "x + 1"), enable_jupyter=True)
    await cluster.until(trace.exists, what="the cell", limit=60.0)
    cluster.kill("victim")
    cluster.start_tool("survivor", **POOLS)
    gate.write_text("continue\n")
    await cluster.settle([conversation_id])
    assert await answers(cluster, conversation_id) == ["out", "42"]
    assert trace.read_text() == "in\n"


@pytest.mark.parametrize("boundary", ["tool.after_result", pytest.param("tool.before_run", marks=pytest.mark.slow)])
async def test_a_cell_runs_once_whenever_its_worker_dies(cluster: FaultCluster, boundary: str) -> None:
    trace = cluster.root / "trace"
    cluster.start_controller()
    cluster.start_tool("victim", DECKHANDS_FAILPOINTS=f"{boundary}:kill@1", **POOLS)
    code = f"print('in', file=open({str(trace)!r}, 'a')); print('out')"
    (conversation_id,) = await cluster.submit(cells(code), enable_jupyter=True)
    assert await cluster.until_ended("victim", limit=60.0) == -9
    cluster.start_tool("survivor", **POOLS)
    await cluster.settle([conversation_id])
    assert await answers(cluster, conversation_id) == ["out"]
    assert trace.read_text() == "in\n"
