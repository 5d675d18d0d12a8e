"""Programs that take all they can get: of processes, memory, descriptors and disk. The workspace continues."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from broker.contract.specs import WorkspaceSpec
from tests.integration.workspace_hosts import Terminal, alive, main_pid, opened, processes
from tool_worker.errors import HostRefused
from tool_worker.sandbox.control_groups import ControlGroups, GroupLimits
from tool_worker.sandbox.sandbox import ResourceLimits
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.named_directories import NamedDirectories
from tool_worker.workspace.open_workspace import OpenWorkspace

IS_ROOT = os.getuid() == 0
GROUPS = ControlGroups.find()
needs_groups = pytest.mark.skipif(isinstance(GROUPS, str), reason=f"no control groups here: {GROUPS}")
needs_mounts = pytest.mark.skipif(not IS_ROOT, reason="mounting a small disk needs root")
MEGABYTE = 2**20


@contextmanager
def small_disk(path: Path, megabytes: int, *, files: int = 100_000) -> Iterator[Path]:
    path.mkdir()
    size = f"size={megabytes}m,nr_inodes={files},mode=777"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@asynccontextmanager
async def working_in(node: Path, disk: Path) -> AsyncIterator[tuple[OpenWorkspace, Terminal]]:
    async with opened(node, sandbox="bwrap", named=NamedDirectories([disk])) as workspaces:
        host = await workspaces.open("conversation", WorkspaceSpec(path=str(disk)))
        yield host, Terminal(host)


async def refusal(host: OpenWorkspace, action_id: int) -> HostRefused | None:
    try:
        await host.run(action_id, "bash", {"command": f"touch effect-{action_id}"})
    except HostRefused as error:
        return error
    return None


@needs_groups
async def test_a_fork_bomb_is_contained_and_cleared_away(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap", limits=ResourceLimits(processes=40)) as workspaces:
        host = await workspaces.open("conversation")
        run = Terminal(host)
        bomb = "bomb() { bomb | bomb & }; bomb; sleep 0.2; echo survived"
        assert "Resource temporarily unavailable" in (await run(bomb, timeout=20, blocking=True)).content
        found = processes(tmp_path, "conversation")
        assert len(found) <= 42
        await workspaces.close("conversation")
        assert alive(found) == []
        assert (await run("echo again")).content == "again"


@needs_groups
async def test_a_program_that_eats_memory_ends_and_nothing_else(tmp_path: Path) -> None:
    limits = ResourceLimits(memory_bytes=150 * MEGABYTE)
    async with opened(tmp_path, sandbox="bwrap", limits=limits) as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        host = main_pid(tmp_path, "conversation")
        await run("A=kept")
        answer = await run("python3 -c 'b = bytearray(400 << 20); print(len(b))'", timeout=60, blocking=True)
        assert answer.exit_code == 137
        told = (
            "[A program was killed or refused memory. All programs of this workspace together may use 150 MiB, "
            "files in /dev/shm included; one that takes more is killed.]"
        )
        assert answer.suffix.endswith(f"\n{told}")
        script = "python3 -c 'b = bytearray(400 << 20)'; echo survived"
        (tmp_path / "conversation" / "workspace" / "eat.sh").write_text(script)
        answer = await run("bash eat.sh 2>&1", timeout=60, blocking=True)
        assert (answer.exit_code, told in answer.suffix) == (0, True)
        assert told not in (await run("echo nobody was Killed here; bash -c 'exit 3'")).suffix
        answer = await run("echo $A")
        assert (answer.content, told in answer.suffix) == ("kept", False)
        answer = await run("head -c 400000000 /dev/zero > /dev/shm/big", timeout=60, blocking=True)
        assert "No space left on device" in answer.content
        for folder in ("/tmp", "~"):  # on the disk
            answer = await run(
                f"head -c 200000000 /dev/zero > {folder}/big; rm {folder}/big", timeout=60, blocking=True
            )
            assert (answer.content, answer.exit_code) == ("", 0)
        assert (await run("echo $A")).content == "kept"
        assert main_pid(tmp_path, "conversation") == host


async def test_without_groups_each_program_is_bounded_by_itself(tmp_path: Path) -> None:
    limits = ResourceLimits(memory_bytes=150 * MEGABYTE)
    async with opened(tmp_path, sandbox="bwrap", limits=limits) as workspaces:
        # As on a machine that gives none.
        workspaces._groups, workspaces._plans = None, replace(workspaces._plans, has_control_groups=False)
        run = Terminal(await workspaces.open("conversation"))
        answer = await run("python3 -c 'b = bytearray(400 << 20); print(len(b))' 2>&1 | tail -1")
        assert answer.content == "MemoryError"
        assert answer.suffix.endswith(
            "\n[A program was killed or refused memory. Each program may use 150 MiB; one that asks for more is refused.]"
        )
        assert (await run("python3 -c 'print(len(bytearray(50 << 20)))'")).content == str(50 << 20)


@needs_groups
async def test_the_group_of_a_workspace_goes_with_it(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        await run("sleep 1000 &")
        binding = HostFolder(tmp_path, "conversation").read_binding()
        groups = [parent / f"deckhands-{binding.host_id}" for parent in GROUPS.parents]
        inside = {int(line) for group in groups for line in (group / "cgroup.procs").read_text().split()}
        assert inside == {process.pid for process in processes(tmp_path, "conversation")[:-1]}
        await workspaces.close("conversation")
        assert not any(group.exists() for group in groups)


@needs_groups
async def test_next_worker_bounds_a_host_its_predecessor_left_unbounded(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap") as first:
        await first.open("conversation")
        await first.aclose()
        host, shell, _ = processes(tmp_path, "conversation")
        for parent in GROUPS.parents:
            for process in (host, shell):
                (parent / "cgroup.procs").write_text(str(process.pid))
        async with opened(tmp_path, sandbox="bwrap", limits=ResourceLimits(processes=40)) as second:
            await second.open("conversation")
            for process in (host, shell):
                groups = Path(f"/proc/{process.pid}/cgroup").read_text()
                assert groups.count("/deckhands-") == len(GROUPS.parents)


@needs_groups
def test_workers_do_not_remove_groups_being_filled() -> None:
    is_over = threading.Event()

    def take_away() -> None:
        while not is_over.is_set():
            GROUPS.drop_empty()

    others = [threading.Thread(target=take_away) for _ in range(2)]
    program = subprocess.Popen(["sleep", "1000"])
    try:
        for other in others:
            other.start()
        for number in range(300):
            assert isinstance(ControlGroups.find(), ControlGroups)
            GROUPS.enclose(f"filled-{number}", [program.pid], GroupLimits(processes=100))
            for parent in GROUPS.parents:
                inside = (parent / f"deckhands-filled-{number}" / "cgroup.procs").read_text().split()
                assert inside == [str(program.pid)]
    finally:
        is_over.set()
        for other in others:
            other.join()
        program.kill()
        program.wait()
        GROUPS.drop_empty()


def test_without_groups_the_reason_is_told(tmp_path: Path) -> None:
    own = tmp_path / "own"
    assert ControlGroups.find(tmp_path, own) == (
        f"control groups cannot be read: [Errno 2] No such file or directory: '{own}'"
    )
    own.write_text("0::/here\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "cgroup.controllers").write_text("cpu io pids\n")
    assert ControlGroups.find(tmp_path, own) == f"{tmp_path}/here does not offer memory"
    own.write_text("1:name=systemd:/\n")
    assert ControlGroups.find(tmp_path, own) == "there are no control groups here"


def test_a_group_of_version_two_gets_the_bounds(tmp_path: Path) -> None:
    group = tmp_path / "deckhands-h"
    group.mkdir()
    for name in ("memory.max", "memory.swap.max", "pids.max", "cgroup.procs"):
        (group / name).write_text("max")
    ControlGroups((tmp_path,), 2).enclose("h", [7], GroupLimits(memory_bytes=5 * MEGABYTE, processes=9))
    written = {path.name: path.read_text() for path in group.iterdir()}
    assert written == {"memory.max": "5242880", "memory.swap.max": "0", "pids.max": "9", "cgroup.procs": "7"}


async def test_a_program_that_leaks_descriptors_fails_alone(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap", limits=ResourceLimits(open_files=64)) as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        answer = await run("python3 -c 'f = [open(\"/dev/null\") for _ in range(100)]' 2>&1 | tail -1")
        assert answer.content == "OSError: [Errno 24] Too many open files: '/dev/null'"
        answer = await run('for i in {10..100}; do eval "exec $i</dev/null" || break; done; echo $i')
        assert answer.content.endswith("64")
        assert (await run("echo fine; ls /proc/self/fd | wc -l")).content.startswith("fine\n")


@needs_mounts
async def test_a_full_disk_is_an_answer(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        async with working_in(tmp_path / "node", disk) as (host, run):
            assert "No space left on device" in (await run("head -c 8000000 /dev/zero > big")).content
            edit = {"command": "create", "path": f"{disk}/new.txt", "file_text": "x" * 100_000}
            edited = await host.run(100, "edit", edit)
            assert "No space left on device" in edited.value["content"]
            assert (await run("rm big; echo room > file; cat file")).content == "room"


@needs_mounts
async def test_full_disk_is_an_answer_and_running_work_continues(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 50, files=1_000) as disk:
        async with opened(disk / "node", sandbox="bwrap") as workspaces:
            host = await workspaces.open("conversation")
            run = Terminal(host)
            fill = "for n in {1..2000}; do : > file$n || break; done"
            assert "No space left on device" in (await run(fill)).content
            edit = {"command": "create", "path": "/workspace/new.txt", "file_text": "x"}
            assert "No space left on device" in (await host.run(100, "edit", edit)).value["content"]
            with pytest.raises(OSError, match="No space left on device"):
                await workspaces.open("another")
            assert (await run("rm file*; echo room > file; cat file")).content == "room"
            assert (await Terminal(await workspaces.open("another"))("echo on")).content == "on"


@needs_mounts
async def test_a_disk_that_became_read_only_is_an_answer(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        async with working_in(tmp_path / "node", disk) as (host, run):
            await run("echo text > file")
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            assert "Read-only file system" in (await run("touch new")).content
            edit = {"command": "str_replace", "path": f"{disk}/file", "old_str": "text", "new_str": "other"}
            assert "Read-only file system" in (await host.run(100, "edit", edit)).value["content"]
            assert (await run("cat file")).content == "text"


@needs_mounts
async def test_full_node_disk_starts_nothing_unrecordable(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        async with opened(disk / "node", sandbox="bwrap") as workspaces:
            host = await workspaces.open("conversation")
            run = Terminal(host)
            assert (await run("head -c 8000000 /dev/zero > big 2>/dev/null; echo full")).content == "full"
            # The rest of the journal's last page takes a few more.
            number = 100
            while (refused := await refusal(host, number)) is None:
                number += 1
            assert (refused.code, refused.retryable) == ("journal_unavailable", True)
            workspace = disk / "node" / "conversation" / "workspace"
            assert not (workspace / f"effect-{number}").exists()
            (workspace / "big").unlink()
            assert (await host.run(number, "bash", {"command": "echo on"})).value["content"] == "on"


async def test_program_cannot_bound_slow_or_expose_its_host(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        pid = main_pid(tmp_path, "conversation")
        assert pid is not None
        before = standing_of(pid)
        await run(
            "prlimit --pid 1 --nofile=3:3; prlimit --pid 1 --as=1:1 --data=1:1 --fsize=0:0; prlimit --pid 1 --cpu=1:1;"
            "renice 19 -p 1; renice 19 -g 1; renice 19 -u agent; ionice -c 3 -p 1; taskset -p 1 1; chrt -i -p 0 1;"
            "for name in oom_score_adj task/1/oom_score_adj; do echo 1000 >/proc/1/$name; done; kill -9 1; kill -STOP 1"
        )
        assert standing_of(pid) == before
        assert (await run("echo on")).content == "on"
        edit = {"command": "create", "path": "/workspace/new.txt", "file_text": "x"}
        await (await workspaces.open("conversation")).run(100, "edit", edit)
        assert (tmp_path / "conversation" / "workspace" / "new.txt").read_text() == "x"


def standing_of(pid: int) -> tuple[object, ...]:
    """Return how the kernel bounds and schedules a process."""
    found = Path(f"/proc/{pid}")
    priority = os.getpriority(os.PRIO_PROCESS, pid)
    limits = (found / "limits").read_text()
    return (
        limits,
        (found / "oom_score_adj").read_text(),
        os.sched_getaffinity(pid),
        os.sched_getscheduler(pid),
        priority,
    )


async def test_programs_limit_and_schedule_themselves_as_they_like(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        for command in (
            "ulimit -n 100; (ulimit -n 50; ulimit -n)",
            "prlimit --pid $$ --nofile=60:60",
            "nice -n 5 true; renice 6 -p $$; taskset -p 1 $$; chrt -b -p 0 $$; ionice -c 3 true",
            "chmod 1777 .; chmod 755 .; mkdir -m 1777 t; install -m 755 /bin/true p; : > f; chmod u=rw,go=r f",
            "python3 -c 'import os; os.open(\"g\", os.O_CREAT | os.O_RDWR, 0o1666)'",
        ):
            answer = await run(command)
            assert answer.exit_code == 0, answer.content


async def test_edit_clears_a_set_user_id_mode(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        host = await workspaces.open("conversation")
        path = tmp_path / "conversation" / "workspace" / "a.sh"
        path.write_text("one")
        path.chmod(0o6755)
        edit = {"command": "str_replace", "path": "/workspace/a.sh", "old_str": "one", "new_str": "two"}
        await host.run(1, "edit", edit)
        assert (path.read_text(), path.stat().st_mode & 0o7777) == ("two", 0o755)
