"""A node dies for good: the conversation continues at another, with its files from the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from broker.contract.events import AgentSpec, LLMSpec
from broker.contract.observations import CmdOutputObservation, ErrorObservation
from tests.faults.harness import FaultCluster
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.workspaces import Workspaces


def turn(command: str) -> dict[str, object]:
    return {"tool_calls": [{"name": "execute_bash", "arguments": {"command": command}}]}


async def end(root: Path, conversation_id: str) -> None:
    """End a workspace's processes, as the end of its machine does."""
    workspaces = Workspaces(root, sandbox="none")
    await workspaces.close(conversation_id)
    await workspaces.aclose()


async def test_the_conversation_goes_on_at_another_node_with_its_files(tmp_path: Path) -> None:
    cluster = FaultCluster(tmp_path)
    roots = {name: tmp_path / name for name in ("n1", "n2")}
    gate = tmp_path / "gate"

    def start(node: str) -> None:
        cluster.start_tool(
            node,
            DECKHANDS_NODE=node,
            DECKHANDS_NODE_DIR=str(roots[node]),
            DECKHANDS_CHECKPOINTS=f"file://{tmp_path}/checkpoints",
            DECKHANDS_CHECKPOINT_EVERY="1",
            DECKHANDS_NODE_LOST_SECONDS="4",
        )

    script = tmp_path / "script.json"
    turns = [
        turn("echo first > file"),
        turn(f"while [ ! -e {gate} ]; do sleep 0.1; done; echo ran >> {tmp_path}/effects"),
        turn("cat file"),
        turn("echo second >> file; cat file"),
        {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]},
    ]
    script.write_text(json.dumps({"turns": turns}))
    async with cluster.running():
        cluster.start_controller()
        start("n1")
        agent = AgentSpec(llm=LLMSpec(model=f"scripted/{script}"))
        conversation_id = await cluster.client.submit("do it", agent=agent)
        await cluster.until_kind(conversation_id, "action.run", count=2)
        await cluster.until(lambda: HostFolder(roots["n1"], conversation_id).is_alive)
        # A workspace is saved after the result of its action is recorded.
        await cluster.until((tmp_path / "checkpoints" / "checkpoints" / conversation_id).exists)
        cluster.kill("n1")
        await end(roots["n1"], conversation_id)
        start("n2")
        await cluster.settle([conversation_id])
        events = await cluster.client.events(conversation_id)
        row = await cluster.client.row(conversation_id)
        assert (row.state, row.node) == ("finished", "n2")
        outputs = [event.content for event in events if isinstance(event, CmdOutputObservation)]
        assert outputs[-2:] == ["first", "first\nsecond"]
        (lost,) = [event for event in events if isinstance(event, ErrorObservation)]
        assert lost.error_id == "workspace_lost"
        assert "restored from the last checkpoint" in lost.content
        assert not (tmp_path / "effects").exists()
        assert (roots["n1"] / conversation_id / "workspace" / "file").read_text() == "first\n"
        await end(roots["n2"], conversation_id)
