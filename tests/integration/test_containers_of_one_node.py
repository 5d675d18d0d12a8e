"""Tool workers of one node in several containers: a shared directory, and separate process ids.

A pid namespace takes the place of the other container: its first process opens a workspace, and all in it end with
that.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.workspace_hosts import LIMIT_SECONDS, ROOT, opened, output
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.workspaces import Workspaces

CONVERSATION = "conversation"
NAMESPACE = {"command": "readlink /proc/self/ns/pid"}
OPENS = """
import asyncio, sys
from pathlib import Path
from tool_worker.workspace.workspaces import Workspaces

async def main():
    workspace = await Workspaces(Path(sys.argv[1]), sandbox="none").open(sys.argv[2])
    running = asyncio.create_task(workspace.run(1, "bash", {"command": sys.argv[3]}))
    while (await workspace.status(1)).state == "unknown":
        await asyncio.sleep(0)
    if not sys.argv[3].startswith("sleep"):
        await running
    print("opened", flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "node"


@pytest.fixture
async def here(root: Path) -> AsyncIterator[Workspaces]:
    async with opened(root) as workspaces:
        yield workspaces


@asynccontextmanager
async def container(root: Path, command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another container, in which a tool worker has opened the workspace and run a command, or started a sleep."""
    unshare = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
    process = await asyncio.create_subprocess_exec(
        *(*unshare, sys.executable, "-c", OPENS, str(root), CONVERSATION, command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_SECONDS):
            assert await process.stdout.readline() == b"opened\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_host_in_another_container_serves_and_is_closed_here(root: Path, here: Workspaces) -> None:
    async with container(root, NAMESPACE["command"]):
        folder = HostFolder(root, CONVERSATION)
        assert (folder.is_alive, folder.read_main_pid()) == (True, None)
        workspace = await here.open(CONVERSATION)
        there = output(dict((await workspace.run(1, "bash", NAMESPACE)).value))
        again = output(dict((await workspace.run(2, "bash", NAMESPACE)).value))
        ours = Path("/proc/self/ns/pid").readlink()
        assert there.content == again.content != str(ours)
        await here.close(CONVERSATION)
        assert not folder.is_alive


async def test_killed_container_leaves_unknown_outcome_and_next_one_continues(root: Path, here: Workspaces) -> None:
    async with container(root, "sleep 60") as other:
        workspace = await here.open(CONVERSATION)
        waiting = asyncio.create_task(workspace.run(1, "bash", {"command": "sleep 60"}))
        other.kill()
        await other.wait()
        async with asyncio.timeout(LIMIT_SECONDS):
            assert (await waiting).is_unknown
            found = output(dict((await workspace.run(2, "bash", NAMESPACE)).value))
        assert found.content == str(Path("/proc/self/ns/pid").readlink())
        assert HostFolder(root, CONVERSATION).read_main_pid() is not None
