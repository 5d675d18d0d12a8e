"""A tool worker killed during a custom tool: one observation, and no effect that its outcome policy forbids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from broker.contract.events import Observation
from tests.faults.harness import FaultCluster

TOOLS = ",".join(f"tests.example_tools:{name}" for name in ("add", "render", "PlaceOrder"))


def calling(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return [
        {"tool_calls": [{"name": name, "arguments": arguments}]},
        {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]},
    ]


async def answers(cluster: FaultCluster, conversation_id: str) -> list[Observation]:
    events = await cluster.client.events(conversation_id)
    actions = [event.id for event in events if event.kind == "action.call_tool"]
    assert len(actions) == 1
    return [event for event in events if isinstance(event, Observation) and event.cause == actions[0]]


async def run_with_a_kill(
    cluster: FaultCluster, boundary: str, turns: list[dict[str, Any]], tool: str
) -> tuple[Observation, list[str]]:
    trace = cluster.root / "trace"
    environment = {"DECKHANDS_TOOLS": TOOLS, "DECKHANDS_POOLS": "bash,gpu", "EXAMPLE_TOOLS_TRACE": str(trace)}
    cluster.start_controller()
    cluster.start_tool("victim", DECKHANDS_FAILPOINTS=f"{boundary}:kill@1", **environment)
    ids = await cluster.submit(turns, tools=[tool])
    assert await cluster.until_ended("victim") == -9
    cluster.start_tool("survivor", **environment)
    await cluster.settle(ids)
    (answer,) = await answers(cluster, ids[0])
    return answer, Path(trace).read_text().splitlines() if trace.exists() else []


@pytest.mark.parametrize("boundary", ["tool.after_append", pytest.param("tool.before_claim", marks=pytest.mark.slow)])
async def test_outside_of_the_call_nothing_is_lost(cluster: FaultCluster, boundary: str) -> None:
    answer, trace = await run_with_a_kill(cluster, boundary, calling("render", scene="sea"), "render")
    assert (answer.kind, answer.content) == ("observation.call_tool", "rendered sea")
    assert len(trace) == 1


@pytest.mark.parametrize(
    ("boundary", "effects"), [pytest.param("tool.before_run", 0, marks=pytest.mark.soak), ("tool.after_result", 1)]
)
async def test_an_outcome_that_nobody_knows_is_said_to_be_unknown(
    cluster: FaultCluster, boundary: str, effects: int
) -> None:
    answer, trace = await run_with_a_kill(cluster, boundary, calling("render", scene="sea"), "render")
    assert answer.kind == "observation.outcome_unknown"
    assert len(trace) == effects


@pytest.mark.parametrize(
    ("boundary", "content"),
    [
        pytest.param("tool.before_run", "Ordered 1 lamp.", marks=pytest.mark.soak),
        ("tool.after_result", "Had been ordered."),
    ],
)
async def test_a_checkable_call_takes_effect_once(cluster: FaultCluster, boundary: str, content: str) -> None:
    answer, trace = await run_with_a_kill(cluster, boundary, calling("place_order", item="lamp"), "place_*")
    assert (answer.kind, answer.content) == ("observation.call_tool", content)
    assert len(trace) == 1
