"""Two hundred ways out of a workspace, each tried in a real one. None may lead anywhere."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.workspace_hosts import Terminal, opened
from tests.security import escape_probes
from tool_worker.sandbox.docker import ContainerSettings
from tool_worker.sandbox.sandbox import find_interpreter

PROBES = list(escape_probes.probes())
IS_ROOT = os.getuid() == 0
# Without a sandbox these would do what they try, or wait for an answer from somewhere else.
NOT_OUTSIDE = {"metadata_service", "name_server", "link_local", "kill_first_SIGKILL", "kill_first_SIGSTOP"} | {
    name for name in PROBES if name.startswith("first_")
}
FEWEST_OUTSIDE = 120


@contextmanager
def targets(folder: Path) -> Iterator[dict[str, str]]:
    """Yield what the probes look for; all of it is there while they look."""
    folder.mkdir()
    secret = folder / "secret"
    secret.write_text("canary")
    name = f"deckhands-escape-probe-{os.getpid()}"  # the machine has one space of such names
    waiting = [find_interpreter(), "-I", "-S", "-c", "import sys; sys.stdin.read()", "argument-canary"]
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
        subprocess.Popen(waiting, stdin=subprocess.PIPE, env={"CANARY": "environment-canary"}) as somebody,
    ):
        named.bind(str(folder / "socket"))
        named.listen()
        abstract.bind(f"\0{name}")
        abstract.listen()
        yield {
            "secret": str(secret),
            "folder": str(folder),
            "socket": str(folder / "socket"),
            "abstract": name,
            "port": str(listener.getsockname()[1]),
            "pid": str(somebody.pid),
            "argument": "argument-canary",
            "environment": "environment-canary",
        }
        somebody.communicate(timeout=10)


def prepared(workspace: Path, settings: dict[str, str]) -> None:
    shutil.copy(escape_probes.__file__, workspace)
    (workspace / "settings.json").write_text(json.dumps(settings))
    for file in workspace.iterdir():
        file.chmod(0o644)  # in a container a program is not who made them


async def tried(root: Path, settings: dict[str, str], python: str, **sandbox: Any) -> dict[str, str | None]:
    async with opened(root, **sandbox) as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        workspace = root / "conversation" / "workspace"
        prepared(workspace, settings)
        command = f"{python} escape_probes.py settings.json > found.json"
        answer = await run(command, blocking=True, timeout=60)
        assert (answer.content, answer.exit_code) == ("", 0)
        return json.loads((workspace / "found.json").read_text())


def test_none_leads_out(tmp_path: Path) -> None:
    """One test for all: they share one workspace, and test processes would each make one."""
    with targets(tmp_path / "targets") as settings:
        found = asyncio.run(tried(tmp_path / "node", settings, find_interpreter(), sandbox="bwrap"))
    assert len(found) == len(PROBES)
    assert {name: reached for name, reached in found.items() if reached is not None} == {}


@pytest.mark.docker
def test_none_of_them_leads_out_of_a_container(tmp_path: Path) -> None:
    from tests.docker_image import image

    with targets(tmp_path / "targets") as settings:
        containers = ContainerSettings((image(),))
        found = asyncio.run(tried(tmp_path / "node", settings, "python3", sandbox="docker", containers=containers))
    assert len(found) == len(PROBES)
    assert {name: reached for name, reached in found.items() if reached is not None} == {}


def test_there_are_many_of_them() -> None:
    assert len(PROBES) == len(set(PROBES)) >= 200


@pytest.mark.skipif(not IS_ROOT, reason="most of it needs root")
def test_most_of_them_lead_somewhere_without_a_sandbox(tmp_path: Path) -> None:
    with targets(tmp_path / "targets") as settings:
        (tmp_path / "place").mkdir()
        prepared(tmp_path / "place", settings)
        chosen = [name for name in PROBES if name not in NOT_OUTSIDE]
        ended = subprocess.run(
            [sys.executable, "escape_probes.py", "settings.json", *chosen],
            cwd=tmp_path / "place",
            capture_output=True,
            check=True,
        )
    found = {name for name, where in json.loads(ended.stdout).items() if where is not None}
    assert len(found) >= FEWEST_OUTSIDE
    ways = {"read_absolute", "write_absolute", "read_by_symlink", "loopback", "unix_socket", "abstract_socket"}
    calls = {
        *("call_bpf", "call_mount", "call_keyctl", "call_ptrace", "call_io_uring_setup", "unshare_user"),
        "clone_user",
    }
    assert ways | calls | {"environment_of_somebody", "signal_somebody", "become_somebody"} <= found
