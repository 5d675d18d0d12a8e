"""Size limits of a workspace, the end of its processes, and the lifetime of leftovers: real shells and directories."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import ConversationCreated, WorkspaceSpec
from broker.contract.observations import CmdOutputObservation
from broker.coordination.action_streams import ActionClaimed, ActionDelivery
from broker.log.conversations import Conversations
from broker.log.deletion import Deletion
from broker.log.event_log import EventLog
from broker.store.store import Store
from tests.integration.workspace_hosts import (
    LIMIT_SECONDS,
    Gate,
    Terminal,
    alive,
    gone,
    main_pid,
    opened,
    processes,
    sleeping,
)
from tests.polling import until
from tests.programs import command_of
from tests.trees import nested
from tool_worker.sandbox.none import find_temporary_directory
from tool_worker.worker.executor import Executor
from tool_worker.worker.node.quota import WorkspaceQuota
from tool_worker.worker.node.reaper import Reaper
from tool_worker.workspace.files.file_tree import TreeLimits
from tool_worker.workspace.launch.host_folder import Binding, HostFolder
from tool_worker.workspace.launch.host_launch import wait_until_dead
from tool_worker.workspace.named_directories import NamedDirectories
from tool_worker.workspace.node_capacity import NodeCapacity
from tool_worker.workspace.workspaces import Workspaces

CID = "conversation"
LIMIT_BYTES = 100_000


class Shell:
    """A workspace with a quota, and commands in it."""

    def __init__(self, log: EventLog, executor: Executor) -> None:
        self.log, self.executor = log, executor

    async def __call__(self, command: str, spec: WorkspaceSpec | None = None) -> CmdOutputObservation:
        await self.log.append(CID, [CmdRunAction(command=command, blocking=True, timeout=30)])
        action = (await self.log.read(CID))[-1]
        entry = await self.log.load_entry(CID, action.id)
        delivery = ActionDelivery(CID, action.id, entry, spec or WorkspaceSpec(), "")
        await self.executor.execute(delivery, ActionClaimed(1))
        answer = (await self.log.read(CID))[-1]
        assert isinstance(answer, CmdOutputObservation)
        return answer


@pytest.fixture
async def shell(request: pytest.FixtureRequest, memory_store: Store, tmp_path: Path) -> AsyncIterator[Shell]:
    """A workspace without a sandbox, or in the one that a test names."""
    log, root = EventLog(memory_store), tmp_path / "node"
    await log.create(ConversationCreated(conversation_id=CID))
    quota = WorkspaceQuota(root, TreeLimits(files=50, bytes=LIMIT_BYTES), first_look_seconds=0.05, pause_factor=0.0)
    sandbox, named = getattr(request, "param", "none"), NamedDirectories([tmp_path / "mine"])
    async with opened(root, sandbox=sandbox, named=named) as workspaces:
        yield Shell(log, Executor(log, workspaces, worker_id="tool-1", quota=quota))


async def test_the_model_is_told_until_it_has_cleared_up(shell: Shell) -> None:
    assert "This workspace holds" not in (await shell("echo small > small")).content
    told = await shell(f"head -c {LIMIT_BYTES} /dev/zero > large")
    assert told.content.endswith("actions that add more are stopped.]")
    holds = f"This workspace holds {LIMIT_BYTES + 6:,} bytes in 2 files, its home and /tmp included; the limit is "
    assert f"{holds}{LIMIT_BYTES:,} bytes" in told.content
    assert "This workspace holds" in (await shell("ls")).content
    assert "This workspace holds" not in (await shell("rm large")).content
    assert "51 files" in (await shell("touch {1..50}")).content


async def test_unbounded_growth_is_stopped_but_cleanup_is_not(shell: Shell) -> None:
    grown = await shell("while :; do head -c 50000 /dev/zero >> large; done")
    assert grown.exit_code != 0
    assert "This workspace holds" in grown.content
    cleared = await shell("sleep 0.5; rm large; echo cleared")
    assert (cleared.exit_code, cleared.content) == (0, "cleared")


async def test_excess_at_the_first_scan_is_stopped(shell: Shell) -> None:
    await shell("echo small > small")
    grown = await shell(f"head -c {10 * LIMIT_BYTES} /dev/zero > large; sleep 20")
    assert grown.exit_code == 130
    assert "This workspace holds" in grown.content


async def test_the_model_is_told_of_what_is_nested_too_deep(shell: Shell) -> None:
    nest = "top=$PWD; name=$(printf 'd%.0s' {1..200}); for i in {1..17}; do mkdir $name; cd $name; done; echo made"
    told = "[This workspace has paths longer than 3,072 bytes. Delete them now: while they exist, nothing"
    assert (await shell(nest)).content.startswith(f"made\n{told}")
    assert told in (await shell("echo still")).content
    assert (await shell("cd $top; sleep 0.3; rm -r d*; echo cleared up")).content == "cleared up"


@pytest.mark.parametrize("shell", ["bwrap"], indirect=True)
async def test_home_counts_but_a_directory_of_the_user_does_not(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    spec = WorkspaceSpec(path=str(tmp_path / "mine"))
    assert (await shell(f"head -c {2 * LIMIT_BYTES} /dev/zero > large", spec)).content == ""
    grown = await shell("while :; do head -c 50000 /dev/zero >> ~/large; done", spec)
    assert grown.exit_code != 0
    assert "This workspace holds" in grown.content
    assert (await shell("rm ~/large", spec)).content == ""


async def left(store: Store, root: Path, conversation_id: str, *, is_closed: bool, path: Path | None = None) -> Path:
    """Leave a workspace behind, as a tool worker that has ended it does."""
    log = EventLog(store)
    await log.create(ConversationCreated(conversation_id=conversation_id))
    if is_closed:
        await Conversations(store).close(conversation_id)
    folder = HostFolder(root, conversation_id)
    folder.create()
    folder.workspace.mkdir()
    (folder.workspace / "file").write_text(conversation_id)
    place = str(path or folder.workspace)
    folder.write_binding(Binding(place, str(folder.workspace), "none", False, secrets.token_hex(16)))
    return folder.workspace


async def test_only_what_closed_conversations_have_left_is_removed(memory_store: Store, tmp_path: Path) -> None:
    root, mine = tmp_path / "node", tmp_path / "mine"
    mine.mkdir()
    (mine / "file").write_text("mine")
    live = await left(memory_store, root, "live", is_closed=False)
    await left(memory_store, root, "closed", is_closed=True)
    await left(memory_store, root, "on-mine", is_closed=True, path=mine)
    lent = await left(memory_store, root, "lent", is_closed=True)
    await left(memory_store, root, "borrower", is_closed=False, path=lent)
    working = await left(memory_store, root, "working", is_closed=True)
    (root / "unknown" / "workspace").mkdir(parents=True)
    (root / "closed" / "workspace" / "out").symlink_to(mine)
    HostFolder(root, "closed").create_home()
    module = HostFolder(root, "closed").home / "go" / "module"
    module.mkdir(parents=True)
    (module / "file").touch()
    module.chmod(0o500)
    (root / "link").symlink_to(mine)
    (root / ".removed-half").mkdir()
    held = HostFolder(root, "working").take_alive_lock()
    assert held is not None
    assert await Reaper(memory_store, root, 3600.0).sweep() == []
    assert sorted(await Reaper(memory_store, root, 0.0).sweep()) == ["closed", "on-mine"]
    assert {path.name for path in root.iterdir()} == {"live", "lent", "borrower", "working", "unknown", "link"}
    assert (mine / "file").read_text() == "mine"
    assert (live / "file").exists()
    assert (working / "file").exists()
    assert await Reaper(memory_store, root / "nowhere", 0.0).sweep() == []


async def test_leftovers_of_deleted_conversations_go_unknown_ones_stay(memory_store: Store, tmp_path: Path) -> None:
    for name in ("deleted", "another", "alive"):
        await left(memory_store, tmp_path, name, is_closed=False)
    await Deletion(memory_store).delete("deleted", last_id=1)
    await memory_store.connection.call(
        "DEL", memory_store.known_keys("another").meta
    )  # as in a store that is another one
    reaper = Reaper(memory_store, tmp_path, 0.0)
    assert await reaper.sweep() == []
    for name in ("deleted", "alive", "never-here"):
        await reaper.mark_if_deleted(name)
    assert await Reaper(memory_store, tmp_path, 3600.0).sweep() == []
    assert await reaper.sweep() == ["deleted"]
    assert {path.name for path in tmp_path.iterdir()} == {"another", "alive"}


async def test_failed_removal_of_one_workspace_blocks_no_other(memory_store: Store, tmp_path: Path) -> None:
    for name in ("deep", "held", "plain", "torn"):
        await left(memory_store, tmp_path, name, is_closed=True)
    (tmp_path / "torn" / "host" / "binding.json").write_text("")  # as a power cut leaves it
    (tmp_path / "held" / "host" / "opening.lock").mkdir()
    with nested(tmp_path / "deep" / "workspace", 1500):
        assert sorted(await Reaper(memory_store, tmp_path, 0.0).sweep()) == ["deep", "plain", "torn"]
        assert [path.name for path in tmp_path.iterdir()] == ["held"]
    (tmp_path / "held" / "host" / "opening.lock").rmdir()
    assert await Reaper(memory_store, tmp_path, 0.0).sweep() == ["held"]


async def test_leftovers_of_killed_hosts_and_workers_go_before_closing(memory_store: Store, tmp_path: Path) -> None:
    root = tmp_path / "node"
    workspace = await left(memory_store, root, "live", is_closed=False)
    (root / "live" / ".draft-half" / "workspace").mkdir(parents=True)
    async with opened(root) as workspaces:
        await (await workspaces.open("live")).run(1, "bash", {"command": "mktemp; setsid sleep 1000 & disown"})
        await until(lambda: sleeping(root, "live") == ["1000"], what="the program")
        host = psutil.Process(main_pid(root, "live"))
        [orphan] = [found for found in host.children(recursive=True) if command_of(found)[:1] == ["sleep"]]
        binding = HostFolder(root, "live").read_binding()
        temporary = find_temporary_directory(binding.host_id)
        assert len(list(temporary.iterdir())) == 1
        assert await Reaper(memory_store, root, 0.0).sweep() == []
        assert len(list(temporary.iterdir())) == 1
        host.kill()
        await gone(host.pid)
        assert orphan.is_running()
        assert await Reaper(memory_store, root, 0.0).sweep() == []
        assert not temporary.exists()
        assert not alive([orphan])
    assert {path.name for path in (root / "live").iterdir()} == {"workspace", "host"}
    assert (workspace / "file").exists()


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
