"""When the processes of a workspace end though nobody closed it: at rest, and when the node has no room for more."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.integration.workspace_hosts import LIMIT_SECONDS, Gate, Terminal, alive, main_pid, opened, processes
from tool_worker.sandbox.none import find_temporary_directory
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.launch.host_launch import wait_until_dead
from tool_worker.workspace.node_capacity import NodeCapacity
from tool_worker.workspace.workspaces import Workspaces

NEW_SHELL = (
    "[The previous shell has ended, and this is a new one in {}. Lost: shell variables and functions, the current "
    "directory, other terminals and all programs that were running{}. Kept: {}.]\n"
)
KEPT = "the files of the workspace, of the home and of /tmp, and the history of undo_edit"
KEPT_WITHOUT_SANDBOX = "all other files, and the history of undo_edit"


def living(workspaces: Workspaces) -> set[str]:
    return {state.conversation_id for state in workspaces.list() if state.is_alive}


def crowded(folder: Path, *, terminals: int, maximum: int = 100) -> NodeCapacity:
    """Return the room of a machine with so many terminals in use."""
    (folder / "sys/kernel/pty").mkdir(parents=True, exist_ok=True)
    for name, number in {"nr": terminals, "max": maximum, "reserve": 0}.items():
        (folder / "sys/kernel/pty" / name).write_text(f"{number}\n")
    (folder / "meminfo").write_text("MemTotal:       1000 kB\nMemFree:     10 kB\nMemAvailable:    900 kB\n")
    return NodeCapacity(folder)


@pytest.mark.parametrize("sandbox", ["bwrap", "none"])
async def test_resting_session_ends_and_next_command_reads_so(tmp_path: Path, sandbox: str) -> None:
    async with opened(tmp_path, sandbox=sandbox, idle_seconds=2.0) as workspaces:
        host = await workspaces.open("conversation")
        run = Terminal(host)
        assert (await run("A=1; echo $A > kept")).prefix == ""
        found = processes(tmp_path, "conversation")
        assert await wait_until_dead(HostFolder(tmp_path, "conversation"), LIMIT_SECONDS)
        assert alive(found) == []
        again = await run("cat kept; echo ${A:-gone}")
        assert again.content == "1\ngone"
        path = (await host.connection.ping()).workspace
        confined = sandbox == "bwrap"
        host_id = HostFolder(tmp_path, "conversation").read_binding().host_id
        lost = "" if confined else f", and the temporary files in {find_temporary_directory(host_id)}"
        assert again.prefix == NEW_SHELL.format(path, lost, KEPT if confined else KEPT_WITHOUT_SANDBOX)
        assert (await run("true")).prefix == ""


@pytest.mark.parametrize("end", ["rest", "kill"])
async def test_home_temporary_files_and_undo_history_outlive_the_host(tmp_path: Path, end: str) -> None:
    async with opened(tmp_path, sandbox="bwrap", idle_seconds=1.0 if end == "rest" else 300.0) as workspaces:
        host = await workspaces.open("conversation")
        run = Terminal(host)
        edit = {"path": "/workspace/file", "command": "create", "file_text": "one\n"}
        assert not (await host.run(100, "edit", edit)).value["is_error"]
        edit |= {"command": "str_replace", "old_str": "one", "new_str": "two"}
        assert not (await host.run(101, "edit", edit)).value["is_error"]
        assert (await run("echo home > ~/in-home; echo tmp > /tmp/in-tmp; echo shm > /dev/shm/x")).exit_code == 0
        folder = HostFolder(tmp_path, "conversation")
        if end == "kill":
            os.kill(main_pid(tmp_path, "conversation"), signal.SIGKILL)
        assert await wait_until_dead(folder, LIMIT_SECONDS)
        assert (await run("cat ~/in-home /tmp/in-tmp")).content == "home\ntmp"
        assert (await run("ls /dev/shm")).content == ""
        undone = (await host.run(102, "edit", {"path": "/workspace/file", "command": "undo_edit"})).value
        assert (undone["is_error"], undone["new_content"]) == (False, "one\n")
        other = Terminal(await workspaces.open("another"))
        assert (await other("find ~ /tmp -maxdepth 1 -name 'in-*'")).content == ""


async def test_a_session_with_a_background_job_does_not_rest(tmp_path: Path) -> None:
    workspace = tmp_path / "conversation" / "workspace"
    workspace.mkdir(parents=True)
    gate = Gate(workspace, "gate")
    async with opened(tmp_path, sandbox="bwrap", idle_seconds=0.1) as workspaces:
        host = await workspaces.open("conversation")
        run = Terminal(host)
        await run("A=1; cat gate > got &")
        begun = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < begun + 0.5:
            assert (await host.connection.ping()).workspace == "/workspace"
            await asyncio.sleep(0)
        assert (await run("echo $A")).content == "1"
        gate.open()


async def test_a_command_that_runs_is_not_rest(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap", idle_seconds=0.1) as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        assert (await run("sleep 0.5; echo done")).content == "done"


async def test_least_recently_used_sessions_end_first(tmp_path: Path) -> None:
    root, proc = tmp_path / "node", tmp_path / "proc"
    async with opened(root, sandbox="bwrap", capacity=crowded(proc, terminals=1)) as workspaces:
        gates = {}
        for name in ("running", "oldest", "older", "job", "newest"):
            directory = root / name / "workspace"
            directory.mkdir(parents=True)
            gates[name] = Gate(directory, "gate")
        running = asyncio.create_task((await workspaces.open("running")).run(1, "bash", {"command": "read x < gate"}))
        for name in ("oldest", "older", "job", "newest"):
            await Terminal(await workspaces.open(name))("sleep 1000 &" if name == "job" else "true")
        crowded(proc, terminals=95)
        await workspaces.open("one-more")
        assert living(workspaces) == {"running", "older", "job", "newest", "one-more"}
        await workspaces.open("yet-one-more")
        assert living(workspaces) == {"running", "job", "newest", "one-more", "yet-one-more"}
        gates["running"].open()
        assert (await running).value["content"] == ""


async def test_without_room_background_jobs_end_only_when_nobody_rests(tmp_path: Path) -> None:
    root, proc = tmp_path / "node", tmp_path / "proc"
    async with opened(root, sandbox="bwrap", capacity=crowded(proc, terminals=1)) as workspaces:
        for name in ("first", "second"):
            await Terminal(await workspaces.open(name))("sleep 1000 &")
        crowded(proc, terminals=95)
        await workspaces.open("one-more")
        assert living(workspaces) == {"second", "one-more"}


def test_room_is_short_by_terminals_or_by_memory(tmp_path: Path) -> None:
    room = crowded(tmp_path, terminals=89)
    assert not room.is_short()
    crowded(tmp_path, terminals=90)
    assert room.is_short()
    crowded(tmp_path, terminals=1)
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 99 kB\n")
    assert room.is_short()
    assert not NodeCapacity(tmp_path / "no-proc").is_short()
