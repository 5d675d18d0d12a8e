"""A tool worker killed during a call to an MCP server: one observation, and the call is not made twice."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from broker.contract.events import Observation
from broker.contract.observations import MCPObservation
from tests.faults.harness import FaultCluster

PROGRAM = Path(__file__).resolve().parents[1] / "example_mcp_server.py"


def calling(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return [
        {"tool_calls": [{"name": name, "arguments": arguments}]},
        {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]},
    ]


def configured(cluster: FaultCluster) -> dict[str, str]:
    path = cluster.root / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"example": {"command": sys.executable, "args": [str(PROGRAM)]}}}))
    return {"DECKHANDS_MCP": str(path)}


async def answer_of(cluster: FaultCluster, conversation_id: str) -> Observation:
    events = await cluster.client.events(conversation_id)
    (action,) = [event for event in events if event.kind == "action.call_tool_mcp"]
    (answer,) = [event for event in events if isinstance(event, Observation) and event.cause == action.id]
    return answer


async def test_a_call_goes_through_the_whole_cluster(cluster: FaultCluster) -> None:
    cluster.start_controller()
    cluster.start_tool(**configured(cluster))
    (conversation_id,) = await cluster.submit(calling("echo", text="hello"), tools=["example/*"])
    await cluster.settle([conversation_id])
    answer = await answer_of(cluster, conversation_id)
    assert isinstance(answer, MCPObservation)
    assert json.loads(answer.content)["content"][0]["text"] == "hello"


async def test_call_in_flight_is_unknown_and_not_repeated(cluster: FaultCluster) -> None:
    trace, gate = cluster.root / "trace", cluster.root / "gate"
    os.mkfifo(gate)
    environment = configured(cluster)
    cluster.start_controller()
    cluster.start_tool("victim", **environment)
    turns = calling("count", trace=str(trace), gate=str(gate))
    (conversation_id,) = await cluster.submit(turns, tools=["example/count"])
    await cluster.until(trace.exists, what="the call")
    cluster.kill("victim")
    gate.write_text("continue\n")  # lets the program end, which nobody else would
    cluster.start_tool("survivor", **environment)
    await cluster.settle([conversation_id])
    answer = await answer_of(cluster, conversation_id)
    assert answer.kind == "observation.outcome_unknown"
    assert trace.read_text() == "counted\n"
