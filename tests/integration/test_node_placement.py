"""Nodes of real tool workers: the needs of a workspace choose one, and a name means one directory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.contract.events import AgentSpec, LLMSpec
from broker.contract.observations import CmdOutputObservation, ErrorObservation
from broker.contract.specs import WorkspaceNeeds, WorkspaceSpec
from broker.coordination.membership import ClusterMember, list_members
from broker.coordination.placement import NotServed
from tests.faults.harness import FaultCluster, steps
from tool_worker.workspace.bindings import find_worker_elsewhere, read_or_create_identity
from tool_worker.workspace.workspaces import Workspaces

GIB = 2**30
GPU = WorkspaceSpec(sandbox="none", needs=WorkspaceNeeds(labels=("gpu",)))
SCRIPT = [
    {"tool_calls": [{"name": "execute_bash", "arguments": {"command": "echo ran"}}]},
    {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]},
]


class Nodes(FaultCluster):
    """Nodes by name, with a directory each."""

    _begun = 0

    def start_node(self, name: str, **offered: str) -> None:
        settings = {"DECKHANDS_SANDBOX": "none", "DECKHANDS_NODE_DIR": str(self.root / name), **offered}
        self.start_tool(name, DECKHANDS_NODE=name, **settings)

    async def begin(self, workspace: WorkspaceSpec, turns: list[dict[str, object]] = SCRIPT) -> str:
        self._begun += 1  # a separate file: it is not read while it is written
        script = self.root / f"script-of-{self._begun}.json"
        script.write_text(json.dumps({"turns": turns}))
        agent = AgentSpec(llm=LLMSpec(model=f"scripted/{script}"))
        return await self.client.submit("do it", agent=agent, workspace=workspace)

    async def end(self, name: str, ids: list[str]) -> None:
        workspaces = Workspaces(self.root / name, sandbox="none")
        for conversation_id in ids:
            await workspaces.close(conversation_id)
        await workspaces.aclose()

    async def node_of(self, conversation_id: str) -> str:
        return (await self.client.row(conversation_id)).node

    async def outputs(self, conversation_id: str) -> list[str]:
        events = await self.client.events(conversation_id)
        return [event.content for event in events if isinstance(event, CmdOutputObservation)]


async def registered(cluster: Nodes, count: int) -> None:
    async def are_there() -> bool:
        return len(await list_members(cluster.client.store)) >= count

    await cluster.until(are_there, what="workers that have registered", limit=60.0)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Nodes]:
    nodes = Nodes(tmp_path)
    async with nodes.running():
        yield nodes


async def test_conversations_run_where_their_sandbox_is(cluster: Nodes) -> None:
    for name in ("a", "b", "c"):
        cluster.start_node(name, DECKHANDS_SANDBOX="bwrap")
    cluster.start_node("open", DECKHANDS_SANDBOX="none")
    cluster.start_controller()
    await registered(cluster, 5)
    ids = [await cluster.begin(WorkspaceSpec(sandbox="none")) for _ in range(6)]
    await cluster.settle(ids)
    assert {await cluster.node_of(conversation_id) for conversation_id in ids} == {"open"}
    assert [await cluster.outputs(conversation_id) for conversation_id in ids] == [["ran"]] * 6
    await cluster.end("open", ids)


async def test_labels_and_sizes_choose_the_node(cluster: Nodes) -> None:
    cluster.start_node("small", DECKHANDS_WORKSPACE_MEMORY_BYTES=str(GIB))
    cluster.start_node("large", DECKHANDS_WORKSPACE_MEMORY_BYTES=str(8 * GIB))
    cluster.start_node("gpu", DECKHANDS_LABELS="gpu,ssd", DECKHANDS_WORKSPACE_MEMORY_BYTES=str(GIB))
    cluster.start_controller()
    await registered(cluster, 4)
    large = WorkspaceSpec(sandbox="none", needs=WorkspaceNeeds(memory_bytes=4 * GIB))
    wanted = {"gpu": GPU, "large": large}
    begun = {node: [await cluster.begin(workspace) for _ in range(3)] for node, workspace in wanted.items()}
    for node, ids in begun.items():
        await cluster.settle(ids)
        assert [await cluster.node_of(conversation_id) for conversation_id in ids] == [node] * 3
        await cluster.end(node, ids)
    # A workspace that no node serves is refused before it is queued, also as a fork.
    needs = WorkspaceNeeds(labels=("gpu",), memory_bytes=2 * GIB)
    with pytest.raises(NotServed) as refused:
        await cluster.begin(WorkspaceSpec(sandbox="none", needs=needs))
    assert refused.value.code == "not_served"
    assert "large lacks the label gpu (it offers sandbox " in str(refused.value)
    assert "gpu lacks 2 GiB of memory" in str(refused.value)
    with pytest.raises(NotServed, match="the sandbox docker"):
        await cluster.client.fork(begun["gpu"][0], workspace=WorkspaceSpec(sandbox="docker", image="team/x:1"))


@pytest.mark.soak  # waits for half a minute
async def test_action_that_no_node_serves_is_answered_and_binds_none(cluster: Nodes) -> None:
    cluster.start_node("gpu", DECKHANDS_LABELS="gpu")
    await registered(cluster, 1)
    conversation_id = await cluster.begin(GPU)
    cluster.kill("gpu")
    cluster.start_node("plain")

    async def is_only_node() -> bool:
        return [member.about.get("node") for member in await list_members(cluster.client.store)] == ["plain"]

    await cluster.until(is_only_node, what="removal of the dead worker")
    cluster.start_controller()
    await cluster.until_kind(conversation_id, "observation.error", limit=90.0)
    events = await cluster.client.events(conversation_id)
    (refused,) = [event for event in events if isinstance(event, ErrorObservation)]
    assert refused.error_id == "not_served"
    assert "plain lacks the label gpu" in refused.content
    assert await cluster.node_of(conversation_id) == ""


async def test_a_worker_of_another_directory_does_not_begin(cluster: FaultCluster) -> None:
    cluster.start_controller()
    cluster.start_tool("first")
    (cid,) = await cluster.submit(steps(1))
    await cluster.settle([cid])
    cluster.start_tool("second", DECKHANDS_NODE_DIR=str(cluster.root / "elsewhere"))
    assert await cluster.until_ended("second") == 70
    said = cluster.log_of("second")
    assert "The node 'node1' is served from another directory, by tool-" in said
    assert "Give this worker another DECKHANDS_NODE, or the same DECKHANDS_NODE_DIR." in said
    assert "Traceback" not in said
    cluster.kill("first")
    cluster.start_tool("successor")  # in the same directory, at once
    more = await cluster.submit(steps(1))
    await cluster.settle(more)
    await cluster.check([cid, *more], commands=1)


def test_a_directory_keeps_its_identity(tmp_path: Path) -> None:
    identity = read_or_create_identity(tmp_path / "a")
    assert identity
    assert read_or_create_identity(tmp_path / "a") == identity != read_or_create_identity(tmp_path / "b")
    (tmp_path / "file").write_text("")
    assert read_or_create_identity(tmp_path / "file") == ""


@pytest.mark.parametrize(
    ("role", "node", "directory", "left_seconds", "is_double"),
    [
        ("tool", "n1", "other", 1.0, True),
        ("tool", "n1", "mine", 1.0, False),
        ("tool", "n2", "other", 1.0, False),
        ("tool", "n1", "other", -1.0, False),
        ("tool", "n1", "", 1.0, False),
        ("controller", "n1", "other", 1.0, False),
    ],
)
def test_who_is_a_double(role: str, node: str, directory: str, left_seconds: float, is_double: bool) -> None:
    member = ClusterMember("tool-1", role, left_seconds, {"node": node, "directory": directory})
    assert (find_worker_elsewhere([member], "n1", "mine") is member) is is_double
    assert find_worker_elsewhere([member], "n1", "") is None
