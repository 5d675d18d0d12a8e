"""No progress in real workspaces: the digest of their files, and a run that its policy ends."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from broker.contract.observations import LoopDetectionObservation
from broker.contract.policies import LoopPolicy
from broker.contract.workspace_events import DigestWorkspaceAction, WorkspaceDigestObservation
from tests.faults.harness import FaultCluster
from tool_worker.tools.workspace_digest import COMMAND


def digest(folder: Path) -> str:
    done = subprocess.run(["/bin/bash", "-c", COMMAND], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def git(folder: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    return subprocess.check_output(["git", "-C", str(folder), *settings, *arguments], text=True)


def test_digest_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("1")
    (tmp_path / "a.py").touch()
    assert digest(tmp_path) == before
    (tmp_path / "a.py").write_text("2")
    assert digest(tmp_path) != before


def test_digest_of_a_repository_ignores_what_git_ignores(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / "a.py").write_text("1")
    before = digest(tmp_path)
    (tmp_path / "test.log").write_text("1")
    assert digest(tmp_path) == before
    (tmp_path / "b.py").write_text("not tracked")
    changed = digest(tmp_path)
    assert changed != before
    assert git(tmp_path, "count-objects") == "0 objects, 0 kilobytes\n"  # it leaves nothing behind
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "Add b")
    assert digest(tmp_path) == changed
    (tmp_path / "inside").mkdir()
    assert digest(tmp_path) == changed


def bash(command: str) -> dict[str, Any]:
    return {"tool_calls": [{"name": "execute_bash", "arguments": {"command": command, "security_risk": "LOW"}}]}


async def test_runs_without_progress_are_nudged_ended_and_parked(cluster: FaultCluster) -> None:
    looking = [
        *(bash(f"echo looking {n}") for n in range(3)),
        bash("touch a.py"),
        *(bash(f"echo looking again {n}") for n in range(5)),
    ]
    failing = [
        turn for n in range(5) for turn in (bash(f"echo {n} >> a.py"), bash("echo '1 failed in 0.$RANDOM s'; false"))
    ]
    cluster.start_controller("c1")
    cluster.start_tool("t1")
    (ended,) = await cluster.submit(looking, loop_policy=LoopPolicy(no_diff_steps=3, responses=("nudge",)))
    (parked,) = await cluster.submit(failing, loop_policy=LoopPolicy(same_failure=3, responses=("park",)))
    await cluster.settle([ended, parked])
    await cluster.check([ended], commands=0, state="error")
    events = await cluster.client.events(ended)
    looks = [event.digest for event in events if isinstance(event, WorkspaceDigestObservation)]
    assert len(looks) == sum(isinstance(event, DigestWorkspaceAction) for event in events) == 4
    assert looks[0] == looks[1] != looks[2] == looks[3] != ""
    (nudge,) = [event for event in events if isinstance(event, LoopDetectionObservation)]
    assert nudge.sentence == "No progress: the workspace has not changed in 3 steps."
    summary = await cluster.client.wait_until_settled(ended)
    assert summary.error_code == "stuck_in_loop"
    assert summary.last_error == "AgentStuckInLoopError: No progress: the workspace has not changed in 3 steps"
    await cluster.check([parked], commands=0, state="paused")
    events = await cluster.client.events(parked)
    assert not any(isinstance(event, DigestWorkspaceAction) for event in events)
    (found,) = [event for event in events if isinstance(event, LoopDetectionObservation)]
    assert found.sentence == "No progress: the same command has failed 3 times with the same output."
