"""How many hosts of a node start at once, whichever of its tool workers starts them."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.integration.workspace_hosts import ROOT, opened
from tests.polling import unhurried, until
from tool_worker.errors import WorkspaceUnavailable, wait_to_completion
from tool_worker.workspace.launch.start_slots import STARTS_AT_ONCE, StartSlots
from tool_worker.workspace.layers import NODE_FOLDER

PATIENCE_SECONDS = 0.5
"""How long a start is watched that must not happen."""
HOLDER = """
import asyncio, sys
from pathlib import Path
from tool_worker.workspace.launch.start_slots import STARTS_AT_ONCE, StartSlots

async def main(root):
    slots = StartSlots(root)
    async def hold():
        async with slots.hold():
            print("held", flush=True)
            await asyncio.Event().wait()
    await asyncio.gather(*(hold() for _ in range(STARTS_AT_ONCE)))

asyncio.run(main(Path(sys.argv[1])))
"""


async def test_a_start_waits_for_those_of_another_worker(tmp_path: Path) -> None:
    other = StartSlots(tmp_path)
    async with opened(tmp_path, sandbox="none") as workspaces, contextlib.AsyncExitStack() as held:
        running = await workspaces.open("running")
        for _ in range(STARTS_AT_ONCE):
            await held.enter_async_context(other.hold())
        starting = asyncio.create_task(workspaces.open("starting"))
        await asyncio.wait([starting], timeout=PATIENCE_SECONDS)
        assert not starting.done()
        result = await running.run(1, "bash", {"command": "echo on"})
        assert result.value["content"] == "on", "a running workspace waits for starts"
        await held.aclose()
        async with asyncio.timeout(unhurried(60)):
            await starting


async def test_a_worker_that_dies_gives_its_slots_back(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout is not None
    for _ in range(STARTS_AT_ONCE):
        assert await asyncio.to_thread(holder.stdout.readline) == b"held\n"
    entering = StartSlots(tmp_path).hold()
    waiting = asyncio.create_task(entering.__aenter__())
    await asyncio.wait([waiting], timeout=PATIENCE_SECONDS)
    assert not waiting.done()
    holder.kill()
    holder.communicate()
    async with asyncio.timeout(unhurried(60)):
        await waiting
    await entering.__aexit__(None, None, None)


async def test_start_without_a_slot_leaves_no_lock_behind(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="none") as workspaces:
        node = tmp_path / NODE_FOLDER
        if node.exists():
            node.rename(tmp_path / "aside")
        node.write_text("no folder")
        with pytest.raises(WorkspaceUnavailable):
            await workspaces.open("conversation")
        node.unlink()
        async with asyncio.timeout(unhurried(60)):
            workspace = await workspaces.open("conversation")
        assert (await workspace.run(1, "bash", {"command": "echo on"})).value["content"] == "on"


async def test_process_of_a_cancelled_start_is_reaped(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="none") as workspaces:
        earlier = set(psutil.Process().children())
        starting = asyncio.create_task(workspaces.open("conversation"))
        while not (hosts := set(psutil.Process().children()) - earlier):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        (host,) = hosts
        host.kill()
        await until(lambda: host.status() == psutil.STATUS_ZOMBIE, what="its end")
        await workspaces.open("other")
        assert not psutil.pid_exists(host.pid)


async def test_work_is_awaited_however_often_it_is_cancelled() -> None:
    gate, ended = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait()
        ended.set()

    waiting = asyncio.create_task(wait_to_completion(asyncio.to_thread(work)))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()
