"""Files that a program of a workspace leaves for others to run: only programs of the workspace itself run them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.workspace_hosts import Terminal, gone, main_pid, opened
from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.workspace.launch.session_programs import find_session_programs
from tool_worker.workspace.opening.changes import Changes
from tool_worker.workspace.opening.repositories import SandboxedGit

CID = "conversation"
PYTHON = "import os; os.close(os.open('/workspace/ran-{0}', os.O_CREAT | os.O_WRONLY))"
MODULES = ("sitecustomize", "usercustomize", "json", "signal", "socket", "tool_worker", "ipykernel")
GIT = {
    "core.fsmonitor": "touch /workspace/ran-fsmonitor; false",
    "core.hooksPath": "/workspace/hooks",
    "diff.external": "touch /workspace/ran-external; true",
    "diff.x.textconv": "touch /workspace/ran-textconv; cat",
    "filter.x.clean": "touch /workspace/ran-clean; cat",
    "core.sshCommand": "touch /workspace/ran-ssh",
    "core.pager": "touch /workspace/ran-pager",
}
POISON = r"""
for name in .bashrc .bash_profile .profile .bash_logout; do echo 'touch /workspace/ran-login' > "$HOME/$name"; done
echo 'touch /workspace/ran-bash-env' > env.sh
mkdir hooks; for name in post-checkout post-index-change pre-commit; do
    printf '#!/bin/sh\ntouch /workspace/ran-hook\n' > hooks/$name; chmod +x hooks/$name; done
echo '* filter=x diff=x' > .gitattributes
echo text > file
printf '#!/bin/sh\ntouch /workspace/ran-program\n' | tee ls git env python3 > /dev/null; chmod +x ls git env python3
export BASH_ENV=/workspace/env.sh ENV=/workspace/env.sh PYTHONPATH=/workspace PYTHONSTARTUP=/workspace/json.py
export GIT_SSH_COMMAND='touch /workspace/ran-ssh' PROMPT_COMMAND='touch /workspace/ran-prompt'
"""


def ran(workspace: Path) -> set[str]:
    return {path.name for path in workspace.glob("ran-*")}


@pytest.fixture
async def poisoned(tmp_path: Path) -> Path:
    """A workspace in which everything is poisoned, and of which nothing runs any more."""
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        run = Terminal(await workspaces.open(CID))
        workspace = tmp_path / CID / "workspace"
        await run("/usr/bin/git init -q .")
        for name, value in GIT.items():
            assert (await run(f"/usr/bin/git config {name} '{value}'")).exit_code == 0
        for module in MODULES:
            (workspace / f"{module}.py").write_text(PYTHON.format("python") + "\n")
        assert (await run(POISON)).exit_code == 0
        # Programs of the workspace do run it: it is poison indeed.
        await run("bash -c true; /usr/bin/python3 -c pass; /usr/bin/git add file; /usr/bin/git diff; PATH=.:$PATH ls")
        expected = {"bash-env", "python", "fsmonitor", "clean", "program", "prompt"}
        assert {f"ran-{name}" for name in expected} <= ran(workspace)
        pid = main_pid(tmp_path, CID)
        os.kill(pid, signal.SIGKILL)
        await gone(pid)
        for mark in workspace.glob("ran-*"):
            mark.unlink()
        return workspace


async def test_later_host_runs_none_of_the_poison(poisoned: Path, tmp_path: Path) -> None:
    programs = find_session_programs(["ipython"])
    async with opened(tmp_path, sandbox="bwrap", programs=programs) as workspaces:
        workspace = await workspaces.open(CID)
        run = Terminal(workspace)
        assert (await run("env")).exit_code == 0
        assert not {"BASH_ENV", "ENV", "LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP", "GIT_SSH_COMMAND"} & {
            line.partition("=")[0] for line in (await run("env")).content.splitlines()
        }
        await workspace.run(10, "edit", {"command": "view", "path": "/workspace/file"})
        await workspace.run(11, "code", {"question": "survey"})
        cell = await workspace.run(12, "ipython", {"code": "6 * 7", "include_extra": False, "timeout": 60})
        assert cell.value["content"].endswith("is lost.]\n42")
        assert ran(poisoned) == set()


async def test_changes_are_reported_without_running_any_of_them(poisoned: Path, tmp_path: Path) -> None:
    repositories = SandboxedGit(BubblewrapSandbox(tmp_path / ".sandbox"))
    patch = (await Changes(repositories).compare(poisoned, None, limit_bytes=2**20)).content
    assert b"+text" in patch
    base = tmp_path / "base"
    base.mkdir()
    await repositories.record(poisoned, base)
    assert (await Changes(repositories).compare(poisoned, base, limit_bytes=2**20)).left_out == ()
    assert ran(poisoned) == set()
