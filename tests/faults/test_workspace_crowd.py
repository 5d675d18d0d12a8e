"""Hundreds of workspaces on one node whose tool worker is killed: all of them continue, and none outlives its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.workspace_hosts import ROOT, alive, opened, processes
from tool_worker.workspace.workspaces import Workspaces

MEMORY_LIMIT_BYTES = 15 * 2**20
DAEMONS = "A={number}; sleep 1000 & setsid sleep 1001 & (setsid sh -c 'trap \"\" HUP TERM INT; sleep 1002' &)"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("sandbox", "count"), [("bwrap", 300), ("none", 40)])
async def test_workspaces_survive_their_worker_and_end_with_their_conversation(
    tmp_path: Path, sandbox: str, count: int
) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-m", __name__, str(tmp_path), sandbox, str(count)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    assert worker.stdout is not None
    assert (await asyncio.to_thread(worker.stdout.readline)) == b"open\n"
    os.killpg(worker.pid, signal.SIGKILL)
    worker.communicate()
    names = [f"conversation-{number}" for number in range(count)]
    found = [process for name in names for process in processes(tmp_path, name)]
    assert len(alive(found)) >= count * 4
    hosts = [processes(tmp_path, name)[0] for name in names]
    assert sorted(host.memory_info().rss for host in hosts)[count // 2] < MEMORY_LIMIT_BYTES
    async with opened(tmp_path, sandbox=sandbox) as workspaces:
        for number, name in enumerate(names):
            result = await (await workspaces.open(name)).run(2, "bash", {"command": "echo $A"})
            assert result.value["content"] == str(number)
        await asyncio.gather(*(workspaces.close(name) for name in names))
        assert alive(found) == []
        assert [state for state in workspaces.list() if state.is_alive] == []
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or ())]


async def _work(root: Path, sandbox: str, count: int) -> None:
    workspaces = Workspaces(root, sandbox=sandbox)

    async def begin(number: int) -> None:
        host = await workspaces.open(f"conversation-{number}")
        await host.run(1, "bash", {"command": DAEMONS.format(number=number)})

    await asyncio.gather(*(begin(number) for number in range(count)))
    sys.stdout.write("open\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_work(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
