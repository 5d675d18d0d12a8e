"""Conversations that want a container, on a cluster in which one node has an engine: where they run, and their patch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker.contract.events import AgentSpec, LLMSpec, WorkspaceSpec
from broker.contract.observations import CmdOutputObservation
from broker.coordination.membership import list_members
from tests.docker_image import image
from tests.faults.harness import FaultCluster
from tool_worker.sandbox.docker import ContainerSettings
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.workspaces import Workspaces

pytestmark = pytest.mark.docker
SCRIPT = [
    {"tool_calls": [{"name": "execute_bash", "arguments": {"command": "echo text > new; umask 077; echo x > closed"}}]},
    {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]},
]


async def test_attempts_run_on_the_node_with_the_engine(tmp_path: Path) -> None:
    cluster = FaultCluster(tmp_path)
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": SCRIPT}))
    agent = AgentSpec(llm=LLMSpec(model=f"scripted/{script}"))
    async with cluster.running():
        for name in ("a", "b", "docks"):
            engine = {"DECKHANDS_DOCKER_IMAGES": image()} if name == "docks" else {}
            cluster.start_tool(name, **engine, DECKHANDS_NODE=name, DECKHANDS_NODE_DIR=str(tmp_path / name))
        cluster.start_controller()

        async def are_there() -> bool:
            return len(await list_members(cluster.client.store)) == 4

        await cluster.until(are_there, what="workers", limit=60.0)
        workspace = WorkspaceSpec(sandbox="docker")
        ids = [await cluster.client.submit("do it", agent=agent, workspace=workspace) for _ in range(4)]
        await cluster.settle(ids, limit=120.0)
        for conversation_id in ids:
            assert (await cluster.client.row(conversation_id)).node == "docks"
            events = await cluster.client.events(conversation_id)
            assert [event.exit_code for event in events if isinstance(event, CmdOutputObservation)] == [0]
            patch = await cluster.client.files.diff(conversation_id)
            assert b"+text" in patch
            assert b"b/closed" in patch
        workspaces = Workspaces(tmp_path / "docks", sandbox="docker", containers=ContainerSettings((image(),)))
        for conversation_id in ids:
            await workspaces.close(conversation_id)
            assert not HostFolder(tmp_path / "docks", conversation_id).is_alive
        await workspaces.aclose()
