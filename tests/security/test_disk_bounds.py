"""Background jobs that fill the disk of a node are found and killed, and the model reads of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.workspace_hosts import Terminal, main_pid, opened
from tests.polling import until
from tool_worker.worker.node.disk_bounds import DiskBounds
from tool_worker.worker.node.usage_bounds import TERMINALS, WATCHERS, UsageBounds
from tool_worker.workspace.files.file_tree import TreeLimits
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.resource_usage import ResourceUsage, iter_descendants

CID = "filling"
MIB = 2**20
LIMITS = TreeLimits(files=1_000, bytes=8 * MIB)
JOBS = {
    "one program": "head -c 64M /dev/zero > {place}/filled && sleep 1000",
    "allocated, not written": "for i in $(seq 40); do fallocate -l 2M {place}/filled$i; sleep 0.05; done; touch {place}/filled",
    "many programs": "while true; do head -c 2M /dev/zero >> {place}/filled; sleep 0.05; done",
}


def bounds(root: Path) -> UsageBounds:
    return UsageBounds(root, ResourceUsage(2**40, TERMINALS, WATCHERS), DiskBounds(LIMITS))


@pytest.mark.parametrize("place", ["~", "/workspace"])
@pytest.mark.parametrize("job", sorted(JOBS))
async def test_a_background_job_that_fills_the_disk_is_stopped(tmp_path: Path, place: str, job: str) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        run = Terminal(await workspaces.open(CID))
        await run("X=kept; echo $$ > shell")
        await run("sleep 1000 & echo $! > innocent")
        await run(f"({JOBS[job].format(place=place)}) > /dev/null 2>&1 & echo $! > job")
        looking, notices = bounds(tmp_path), []

        async def is_stopped() -> bool:
            """A look may find a program of the job's, and the next one the job that starts them."""
            await looking.sweep()
            notices.append(looking.take_notice(CID))
            return any(notices) and (await run("kill -0 $(cat job) 2>/dev/null || echo ended")).content == "ended"

        await until(is_stopped, what="the end of the job")
        told = next(filter(None, notices))
        assert "Background jobs wrote to this workspace, its home or /tmp, beyond the limit" in told
        assert (await run("echo $X $$; cat shell; kill -0 $(cat innocent) && echo lives")).content.split()[0] == "kept"
        size = (await run(f"stat -c %s {place}/filled")).content
        await looking.sweep()
        await looking.sweep()
        assert looking.take_notice(CID) == ""
        assert (await run(f"stat -c %s {place}/filled")).content == size
        assert (await run("kill -0 $(cat innocent) && echo lives")).content == "lives"


async def test_a_shell_is_left_alone_when_its_job_has_ended(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        run = Terminal(await workspaces.open(CID))
        await run("X=kept")
        looking = bounds(tmp_path)
        await looking.sweep()
        await run("head -c 64M /dev/zero > filled & wait")
        for _ in range(3):
            await looking.sweep()
        assert looking.take_notice(CID) == ""
        assert (await run("echo $X")).content == "kept"


async def test_bounded_or_constant_usage_is_left_alone(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        run = Terminal(await workspaces.open(CID))
        await run("(while true; do head -c 2M /dev/zero > ~/same; done) & echo $! > job")
        looking = bounds(tmp_path)
        for _ in range(4):
            await looking.sweep()
        assert looking.take_notice(CID) == ""
        assert (await run("kill -0 $(cat job) && echo lives")).content == "lives"
        assert list(iter_descendants(main_pid(tmp_path, CID)))


async def test_workspace_with_many_files_takes_no_others_turn(tmp_path: Path) -> None:
    limits = TreeLimits(files=10, bytes=8 * MIB)
    disk, names = DiskBounds(limits), ["crowded-1", "crowded-2", "crowded-3", CID]
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        for name in names:
            run = Terminal(await workspaces.open(name))
            files = 5 if name == CID else 500
            await run(f"for i in $(seq {files}); do : > $i; done; sleep 1000 &")
        assert disk.start_sweep(names) == names
        for name in names:
            disk.find_writers(HostFolder(tmp_path, name), main_pid(tmp_path, name))
        assert disk.start_sweep(names)[:2] == ["crowded-3", CID]
