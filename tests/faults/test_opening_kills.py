"""A tool worker dies while it opens a workspace: another opens it, once, and the conversation notices nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from broker.contract.events import AgentSpec, LLMSpec, WorkspaceSpec
from broker.contract.observations import CmdOutputObservation
from broker.contract.workspace_events import WorkspaceOpenedObservation
from broker.contract.workspace_sources import GitSource
from tests.faults.harness import FaultCluster


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("tool.before_run", marks=pytest.mark.soak),
        "tool.before_append",
        *(pytest.param(f"tool.after_{what}", marks=pytest.mark.slow) for what in ("claim", "append")),
    ],
)
async def test_a_workspace_is_opened_once_whoever_dies(tmp_path: Path, point: str) -> None:
    cluster, project = FaultCluster(tmp_path), tmp_path / "project"
    project.mkdir()
    (project / "README").write_text("one\n")
    author = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    for arguments in (("init", "--quiet"), ("add", "."), (*author, "commit", "--quiet", "-m", "one")):
        subprocess.run(["git", *arguments], cwd=project, check=True, timeout=20)
    call = {"name": "execute_bash", "arguments": {"command": "cat README"}}
    turns = [{"tool_calls": [call]}, {"tool_calls": [{"name": "finish", "arguments": {"message": "done"}}]}]
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": turns}))
    async with cluster.running():
        cluster.start_controller()
        roots = {"DECKHANDS_REPOSITORY_ROOTS": str(tmp_path)}
        cluster.start_tool("victim", DECKHANDS_FAILPOINTS=f"{point}:kill@1", **roots)
        conversation_id = await cluster.client.submit(
            "do it",
            agent=AgentSpec(llm=LLMSpec(model=f"scripted/{script}")),
            workspace=WorkspaceSpec(source=GitSource(url=f"file://{project}")),
        )
        (tmp_path / f"{conversation_id}.where").write_text(str(tmp_path))
        await cluster.until_ended("victim", limit=60)
        cluster.start_tool("other", **roots)
        await cluster.settle([conversation_id], limit=90)
        events = await cluster.client.events(conversation_id)
        assert (await cluster.client.row(conversation_id)).state == "finished"
        assert sum(isinstance(event, WorkspaceOpenedObservation) for event in events) == 1
        assert [event.content for event in events if isinstance(event, CmdOutputObservation)] == ["one"]
        left = {path.name for path in (tmp_path / "n" / conversation_id).iterdir()}
        assert left >= {"workspace", "base.git", "opened.json"}
        assert not any(name.startswith(".draft-") for name in left)
