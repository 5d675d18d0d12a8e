"""Scripts of a repository in a run from the command line: real workers, a real sandbox, a real clone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.command_line import deckhands, environment
from tests.turns import call, finish, script

SETUP = """
export FROM_SETUP=set
echo made > ~/made-by-setup
touch /workspace/in-workspace
touch /etc/x "$OUTSIDE" 2>/dev/null
echo setup is noisy
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / ".openhands").mkdir(parents=True)
    (folder / ".openhands" / "setup.sh").write_text(SETUP.replace("$OUTSIDE", str(tmp_path / "outside")))
    (folder / ".openhands" / "pre-commit.sh").write_text(
        "echo checked >> ~/commits; ! git diff --cached | grep -q WIP\n"
    )
    commit = "git init -q . && git add . && git -c user.name=a -c user.email=a@b commit -qm first"
    subprocess.run(["bash", "-c", commit], cwd=folder, check=True)
    return folder


def bash(command: str) -> dict[str, object]:
    arguments = {"command": command, "security_risk": "LOW"}
    return call("execute_bash", **arguments)


def test_clone_is_set_up_in_its_sandbox_and_commits_checked(tmp_path: Path, project: Path) -> None:
    model = script(
        tmp_path / "m.json",
        bash("echo $FROM_SETUP $(cat ~/made-by-setup) $(ls in-workspace)"),
        bash(
            "echo WIP > f; git add f; git commit -qm bad; echo $?; echo fine > f; git add f; git commit -qm good; echo $?"
        ),
        bash("cat ~/commits; git status --short"),
        finish("Done."),
    )
    env = environment(tmp_path / "own")
    arguments = ["run", "-t", "work", "-w", f"git+file://{project}", "--model", model, "--sandbox", "bwrap", "--json"]
    done = deckhands(*arguments, env=env)
    assert done.code == 0, done
    runs = [event for event in done.json if event.get("kind") == "action.run"]
    assert [(event["hidden"], event["source"]) for event in runs] == [
        *[(True, "environment")] * 2,
        *[(False, "agent")] * 3,
    ]
    answers = [event["content"] for event in done.json if event.get("kind") == "observation.run"]
    assert answers[0] == "setup is noisy"
    assert answers[2:4] == ["set made in-workspace", "1\n0"]
    assert answers[4].startswith("checked\nchecked")
    assert not (tmp_path / "outside").exists()
    assert not (project / ".git/hooks/pre-commit").exists()


def test_without_a_sandbox_no_script_of_a_repository_runs(tmp_path: Path, project: Path) -> None:
    model = script(tmp_path / "m.json", bash("echo ${FROM_SETUP:-unset}"), finish("Done."))
    arguments = ["run", "-t", "work", "-w", project, "--model", model, "--sandbox", "none", "--json"]
    done = deckhands(*arguments, env=environment(tmp_path / "own"))
    assert done.code == 0, done
    answers = [event["content"] for event in done.json if event.get("kind") == "observation.run"]
    assert answers == ["unset"]
    assert not (tmp_path / "outside").exists()
