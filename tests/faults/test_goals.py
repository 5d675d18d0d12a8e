"""A finish that is checked in the workspace, while workers die."""

from __future__ import annotations

import json

import pytest

from broker.contract.events import AgentSpec, LLMSpec, WorkspaceSpec
from broker.contract.specs import GoalSpec
from tests.faults.harness import FaultCluster

CHECK = "echo begin-$(wc -l < checks) >> effects; echo x >> checks; sleep 2; echo end-x >> effects; test -f fixed"


@pytest.mark.soak
async def test_refused_finish_is_corrected_and_checked_once_each_time(cluster: FaultCluster) -> None:
    folder = cluster.root / "work"
    folder.mkdir()
    (folder / "checks").touch()
    turns = [
        {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]},
        {"tool_calls": [{"name": "execute_bash", "arguments": {"command": "touch fixed"}}]},
        {"tool_calls": [{"name": "finish", "arguments": {"message": "really done"}}]},
    ]
    script = cluster.root / "script.json"
    script.write_text(json.dumps({"turns": turns}))
    cluster.start_controller("c1")
    cluster.start_tool("t1")
    cid = await cluster.client.submit(
        "do it",
        agent=AgentSpec(llm=LLMSpec(model=f"scripted/{script}"), goal=GoalSpec(check=CHECK)),
        workspace=WorkspaceSpec(path=str(folder), sandbox="none"),
    )
    (cluster.root / f"{cid}.where").write_text(str(folder))
    await cluster.until(lambda: "begin-0" in cluster.effects(cid))
    cluster.kill("t1")
    cluster.kill("c1")
    cluster.start_controller("c2")
    cluster.start_tool("t2")
    await cluster.settle([cid])
    await cluster.check([cid], commands=2)
    assert cluster.effects(cid) == ["begin-0", "end-x", "begin-1", "end-x"]
    kinds = [event.kind for event in await cluster.client.events(cid)]
    assert kinds.count("observation.finish_refused") == 1
    assert kinds.count("action.finish") == 2
