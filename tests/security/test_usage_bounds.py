"""Resources of programs that no file shows, and jobs that fill the disk: all are bounded, and the model is notified."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import ConversationCreated, WorkspaceSpec
from broker.contract.observations import CmdOutputObservation
from broker.coordination.action_streams import ActionClaimed, ActionDelivery
from broker.log.event_log import EventLog
from broker.store.store import Store
from tests.integration.test_workspace_quota import crowded
from tests.integration.workspace_hosts import Terminal, main_pid, opened, processes
from tests.polling import until
from tests.programs import command_of
from tests.security.test_bounds import MEGABYTE, needs_groups
from tool_worker.sandbox.sandbox import ResourceLimits
from tool_worker.worker.executor import Executor
from tool_worker.worker.node.disk_bounds import DiskBounds
from tool_worker.worker.node.usage_bounds import TERMINALS, WATCHERS, UsageBounds
from tool_worker.workspace.files.file_tree import TreeLimits
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.node_capacity import ResourceUsage, iter_descendants, measure_usage
from tool_worker.workspace.workspaces import Workspaces

HOLDING = r"""
import ctypes, os, sys, time
kind, count = sys.argv[1], int(sys.argv[2])
def deleted(folder):
    file = open(folder + "/deleted", "wb+")
    os.unlink(folder + "/deleted")
    file.write(bytes(count << 20))
    file.flush()
    return file
held = []
if kind == "deleted":
    held = deleted("/workspace")
elif kind == "deleted_in_tmp":
    held = deleted("/tmp")
elif kind == "deleted_at_home":
    held = deleted(os.path.expanduser("~"))
elif kind == "forked":
    held = deleted("/workspace")
    os.fork()
elif kind == "mapped":
    file = deleted("/workspace")
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap(None, 4096, 1, 1, file.fileno(), 0)
    file.close()
elif kind == "unlinked_in_memory":
    held = [deleted("/dev/shm"), os.memfd_create("held")]
    os.write(held[-1], bytes(count << 20))
elif kind == "linked":
    open("/workspace/linked (deleted)", "wb").write(bytes(count << 20))
    held = open("/workspace/linked (deleted)")
elif kind == "descriptors":
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
elif kind == "named_oddly":
    os.mkdir("/workspace/x\r (deleted)\n (deleted)")
    os.chdir("/workspace/x\r (deleted)\n (deleted)")
    libc = ctypes.CDLL(None)
    held = deleted(".")
    libc.mmap(None, 4096, 1, 1, held.fileno(), 0)
elif kind == "terminals":
    held = [os.openpty() for _ in range(count)]
elif kind == "masters":
    held = [os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY) for _ in range(count)]
elif kind == "watchers":
    held = [ctypes.CDLL(None).inotify_init1(0) for _ in range(count)]
print("held", flush=True)
time.sleep(1000)
"""


async def holding(
    workspaces: Workspaces, root: Path, name: str, kind: str, count: int, *, action_id: int = 1
) -> Terminal:
    """Leave a background job that holds something, and wait until it does."""
    run = Terminal(await workspaces.open(name))
    run.ids = itertools.count(action_id)
    place = root / name / "workspace"
    (place / "hold.py").write_text(HOLDING)
    await run(f"python3 hold.py {kind} {count} > said 2>&1 &")
    said = place / "said"
    await until(lambda: said.exists() and "held" in said.read_text(), what=f"{kind} held")
    return run


def is_holding(root: Path, name: str) -> bool:
    return any("hold.py" in word for process in processes(root, name) for word in command_of(process))


def held_in(root: Path, name: str) -> ResourceUsage:
    pid = main_pid(root, name)
    assert pid is not None
    return measure_usage(pid, [root / name / "workspace"]).total


@pytest.mark.parametrize(
    ("kind", "few", "many"),
    [
        ("descriptors", 30, 250),
        ("named_oddly", 1, 3),
        ("deleted", 1, 3),
        ("deleted_in_tmp", 1, 3),
        ("deleted_at_home", 1, 3),
        ("forked", 1, 3),
        ("mapped", 1, 3),
        ("terminals", 3, 12),
        ("masters", 3, 12),
        ("watchers", 3, 12),
    ],
)
async def test_only_the_session_above_its_limit_is_ended(tmp_path: Path, kind: str, few: int, many: int) -> None:
    bounds = UsageBounds(tmp_path, ResourceUsage(unlinked_bytes=2 * MEGABYTE, terminals=8, watchers=8, descriptors=200))
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        await holding(workspaces, tmp_path, "few", kind, few)
        run = await holding(workspaces, tmp_path, "many", kind, many)
        await run("KEPT=1; sleep 1000 &")
        await bounds.sweep()
        await until(lambda: not is_holding(tmp_path, "many"), what="end of the holder")
        assert is_holding(tmp_path, "few")
        assert (await run("echo $KEPT; jobs -r | wc -l")).content.startswith("1\n1")
        assert bounds.take_notice("few") == ""
        assert "were killed" in bounds.take_notice("many")
        assert bounds.take_notice("many") == ""


async def test_memory_and_named_files_count_once_on_disk(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        for kind in ("unlinked_in_memory", "linked"):
            await holding(workspaces, tmp_path, kind.replace("_", "-"), kind, 3)
            assert held_in(tmp_path, kind.replace("_", "-")).unlinked_bytes == 0


async def test_each_terminal_counts_once_however_many_have_it_open(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        await holding(workspaces, tmp_path, "conversation", "terminals", 5)
        assert held_in(tmp_path, "conversation").terminals == 6  # and the shell's own


@needs_groups
async def test_files_without_a_name_in_memory_count_as_memory(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap", limits=ResourceLimits(memory_bytes=150 * MEGABYTE)) as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        host = main_pid(tmp_path, "conversation")
        filling = "import os; f = os.memfd_create('x'); [os.write(f, bytes(1 << 20)) for _ in range(400)]"
        assert (await run(f'python3 -c "{filling}"', timeout=60, blocking=True)).exit_code == 137
        filling = "import os; f = open('/dev/shm/x', 'wb'); os.unlink('/dev/shm/x'); f.write(bytes(400 << 20))"
        answer = await run(f'python3 -c "{filling}" 2>&1 | tail -1', timeout=60, blocking=True)
        assert "No space left on device" in answer.content
        assert (await run("echo on")).content == "on"
        assert main_pid(tmp_path, "conversation") == host


async def test_the_model_is_told_what_was_ended(memory_store: Store, tmp_path: Path) -> None:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="conversation"))
    bounds = UsageBounds(tmp_path, ResourceUsage(unlinked_bytes=2 * MEGABYTE, terminals=8, watchers=8, descriptors=200))
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        executor = Executor(log, workspaces, worker_id="tool-1", held=bounds)
        await log.append("conversation", [CmdRunAction(command="python3 hold.py terminals 20 &")])
        await holding(workspaces, tmp_path, "conversation", "terminals", 20, action_id=2)
        await bounds.sweep()
        await log.append("conversation", [CmdRunAction(command="echo on")])
        action = (await log.read("conversation"))[-1]
        delivery = ActionDelivery(
            "conversation", action.id, await log.load_entry("conversation", action.id), WorkspaceSpec(), ""
        )
        await executor.execute(delivery, ActionClaimed(1))
        answer = (await log.read("conversation"))[-1]
        assert isinstance(answer, CmdOutputObservation)
        assert "terminals" in answer.content


async def test_greediest_session_ends_when_there_is_no_room(tmp_path: Path) -> None:
    root, proc = tmp_path / "node", tmp_path / "proc"
    async with opened(root, sandbox="bwrap", capacity=crowded(proc, terminals=1)) as workspaces:
        await Terminal(await workspaces.open("resting"))("true")
        await Terminal(await workspaces.open("with-a-job"))("sleep 1000 &")
        await holding(workspaces, root, "greedy", "terminals", 30)
        crowded(proc, terminals=95)
        await workspaces.open("one-more")
        living = {state.conversation_id for state in workspaces.list() if state.is_alive}
        assert living == {"resting", "with-a-job", "one-more"}


CID = "filling"
LIMITS = TreeLimits(files=1_000, bytes=8 * MEGABYTE)
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
    limits = TreeLimits(files=10, bytes=8 * MEGABYTE)
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
