"""Forks of a prepared workspace: they share its files, start with its shell, and survive kills in between."""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import ConversationCreated
from broker.contract.observations import ErrorObservation
from broker.coordination.action_streams import ControlDelivery
from broker.log.deletion import Deletion
from broker.log.event_log import EventLog
from broker.runtime.clock import SystemClock
from broker.secrets.secrets import Secrets
from broker.store.store import Store
from deckhands.client.transfers.files import WorkspaceFiles
from tests.integration.checkpoint_nodes import (
    CID,
    SHARING,
    can_mount,
    fork,
    node,
    node_with_overlays,
    prefix,
    prepared,
    printed,
    serve,
)
from tests.polling import until
from tool_worker.sandbox.bwrap import BubblewrapSandbox
from tool_worker.sandbox.sandbox import Sandbox
from tool_worker.worker.node.reaper import Reaper
from tool_worker.workspace.checkpoints.checkpoint_store import Checkpoints, SavedFiles
from tool_worker.workspace.files.overlay_mounts import is_mounted, unmount, unmount_below
from tool_worker.workspace.files.staging import remove_tree
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.launch.shell_state import ShellState
from tool_worker.workspace.layers import CopyMethod, Layers, attach, detach


@pytest.fixture(params=list(CopyMethod))
def method(request: pytest.FixtureRequest) -> CopyMethod:
    """How forks get their files."""
    return CopyMethod(request.param)


@pytest.fixture
def root(method: CopyMethod, tmp_path: Path) -> Iterator[Path]:
    """The directory of a node whose forks get their files in this way."""
    root = tmp_path / "node"
    root.mkdir()
    if method is CopyMethod.OVERLAY and not can_mount(tmp_path / "trial"):
        pytest.skip("this process may not mount overlays")
    if method is CopyMethod.REFLINK:
        make_xfs(tmp_path / "disk", root)
    yield root
    unmount_below(root)
    if method is CopyMethod.REFLINK:
        subprocess.run(["umount", "--lazy", root], check=True)


@pytest.fixture
def overlays(tmp_path: Path) -> Iterator[Path]:
    """The directory of a node that can mount overlays."""
    with node_with_overlays(tmp_path) as root:
        yield root


def make_xfs(image: Path, at: Path) -> None:
    """Mount a new file system that has reflinks."""
    if shutil.which("mkfs.xfs") is None or os.geteuid() != 0:
        pytest.skip("needs mkfs.xfs and root")
    with image.open("wb") as file:
        file.truncate(400 * 2**20)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", image, at], check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount it: {mounted.stderr.strip()}")


@pytest.fixture
async def log(memory_store: Store) -> EventLog:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id=CID))
    return log


async def test_forks_start_with_files_shell_and_directory(log: EventLog, root: Path, method: CopyMethod) -> None:
    async with prepared(log, root, may_mount=method is CopyMethod.OVERLAY) as one:
        for name in ("first", "second"):
            await fork(log, name)
            asked = 'pwd; cat link; printf "%s\n" "$TOKENS"; bash -c "greet you"; umask; echo ${PATH%%:*} ${plain-none}'
            found = await one.run(asked, conversation_id=name)
            assert printed(found).split("\n") == [
                *("/workspace/src", "one", "a  b", "c", "hello you", "0027", "/workspace/src/bin none"),
            ]
            assert prefix(found).startswith(SHARING)
            assert prefix(await one.run("true", conversation_id=name)) == ""
            assert printed(await one.run("shout; echo $?", conversation_id=name)) == "LOUD\n0"
        await one.run("echo two > deep/file; mv deep moved; rm link", conversation_id="first")
        assert printed(await one.run("cat moved/file; ls -1", conversation_id="first")) == "two\nmoved"
        for name in ("second", CID):
            assert printed(await one.run("cat link; ls -1", conversation_id=name)) == "one\ndeep\nlink"


async def test_fork_without_a_sandbox_keeps_its_own_paths(log: EventLog, root: Path, method: CopyMethod) -> None:
    may_mount, place = method is CopyMethod.OVERLAY, root.parent / "place"
    async with node(log, root, place, every=1, sandbox="none", may_mount=may_mount) as one:
        await one.run("mkdir d && cd d && export HERE=$PWD && cd .. && cd d")
        await fork(log, "fork")
        found = await one.run("pwd; echo $HERE", conversation_id="fork")
        assert printed(found) == f"{root}/fork/workspace/d\n{root}/fork/workspace/d"


async def test_fork_in_mid_action_is_told_instead(log: EventLog, overlays: Path) -> None:
    async with prepared(log, overlays) as one:
        await one.run("echo later > later")
        await fork(log, "early", at=3)
        assert prefix(await one.run("true", conversation_id="early")).startswith(SHARING)
        running = asyncio.create_task(one.run("echo begun > begun; while [ ! -e go ]; do sleep 0.05; done"))
        await until((overlays / CID / "workspace" / "src" / "begun").exists)
        await one.checkpointing.save(CID)
        await fork(log, "during")
        (overlays / CID / "workspace" / "src" / "go").touch()
        await running
        told = await one.run("ls", conversation_id="during")
        assert isinstance(told, ErrorObservation)
        assert "as they were after event" in told.content


async def test_all_readers_see_the_merged_tree(log: EventLog, overlays: Path) -> None:
    async with prepared(log, overlays) as one:
        await fork(log, "fork")
        await one.run("echo new > new; rm link; echo two > deep/file", conversation_id="fork")
        folder = HostFolder(overlays, "fork")
        assert is_mounted(folder.workspace)
        again = Checkpoints(f"file://{overlays.parent}/place", SystemClock())
        again.restore("fork", overlays.parent / "moved")  # as another node does
        src = overlays.parent / "moved" / "src"
        assert sorted(path.name for path in src.iterdir()) == ["deep", "new"]
        assert (src / "deep" / "file").read_text() == "two\n"
        await fork(log, "of-fork", of="fork")
        assert printed(await one.run("cat deep/file; ls", conversation_id="of-fork")) == "two\ndeep  new"


async def test_unmounted_workspace_is_mounted_before_use(log: EventLog, overlays: Path) -> None:
    async with prepared(log, overlays) as one:
        await fork(log, "fork")
        await one.run("echo mine > mine", conversation_id="fork")
    # the hosts have ended, and the machine restarts
    workspace = overlays / "fork" / "workspace"
    assert unmount(workspace)
    assert list(workspace.iterdir()) == []
    async with node(log, overlays, overlays.parent / "place", every=1) as again:
        saved = await again.checkpointing.save("fork")
        assert saved is not None
        assert saved.files == 5
        detach(overlays / "fork")
        assert not is_mounted(workspace)
        assert printed(await again.run("cat src/mine src/link", conversation_id="fork")) == "mine\none"


async def test_lost_layer_is_restored_from_the_last_checkpoint(log: EventLog, overlays: Path) -> None:
    async with prepared(log, overlays) as one:
        await fork(log, "fork")
        await one.run("echo mine > mine", conversation_id="fork")
    detach(overlays / "fork")
    remove_tree(overlays / ".node" / "layers")
    async with node(log, overlays, overlays.parent / "place", every=1) as again:
        told = await again.run("ls", conversation_id="fork")
        assert isinstance(told, ErrorObservation)
        assert told.content.startswith("The files of this workspace were restored from the last checkpoint")
        assert printed(await again.run("cat src/mine src/link", conversation_id="fork")) == "mine\none"


CLOSE = ControlDelivery("fork", 0, "close", "")
KILLED_REMOVAL = """
import os, sys
from pathlib import Path
from tool_worker.workspace.layers import move_away
rename, left = Path.rename, int(sys.argv[2])

def rename_and_die(self, target):
    global left
    rename(self, target)
    left -= 1
    if not left:
        os.kill(os.getpid(), 9)

Path.rename = rename_and_die
target = Path(sys.argv[1], ".draft-of-the-killed")
target.mkdir()
move_away(Path(sys.argv[1]), target)
"""
STATES = ("layer-begun", "layer-made", "noted", "mounted")
KILLED = """
import os, sys
from pathlib import Path
from tool_worker.workspace import layers
root, state = Path(sys.argv[1]), sys.argv[2]

def die(*_):
    os.kill(os.getpid(), 9)

def restore(target):
    target.mkdir()
    (target / "file").write_text("one")
    if state == "layer-begun":
        die()

made = layers.Layers(root)
made.find_method()
if state == "layer-made":
    layers.json.dumps = die
if state == "noted":
    layers.mount_overlay = die
made.create_workspace("fork", "aa", layers.CopyMethod.OVERLAY, restore)
die()
"""


@pytest.mark.parametrize("state", STATES)
def test_killed_worker_leaves_a_fork_that_the_next_one_completes(overlays: Path, state: str) -> None:
    (overlays / "fork").mkdir()
    done = subprocess.run([sys.executable, "-c", KILLED, overlays, state], check=False)
    assert done.returncode == -signal.SIGKILL
    folder = overlays / "fork"
    attach(folder)
    if state in ("noted", "mounted"):
        assert (folder / "workspace" / "file").read_text() == "one"
    else:
        assert not (folder / "workspace").exists()

        def restore(target: Path) -> None:
            target.mkdir()
            (target / "file").write_text("one")

        Layers(overlays).create_workspace("fork", "aa", CopyMethod.OVERLAY, restore)
        assert (folder / "workspace" / "file").read_text() == "one"
    (folder / "workspace" / "file").write_text("two")
    assert (overlays / ".node" / "layers" / "aa" / "tree" / "file").read_text() == "one"
    assert Layers(overlays).remove_unused(math.inf) == 0
    remove_tree(folder)
    assert Layers(overlays).remove_unused(0.0) == 0
    assert Layers(overlays).remove_unused(math.inf) == 1
    assert list((overlays / ".node" / "layers").iterdir()) == []


async def test_reaper_removes_forks_and_then_their_layer(log: EventLog, memory_store: Store, overlays: Path) -> None:
    async with prepared(log, overlays) as one:
        for name in ("kept", "closed"):
            await fork(log, name)
            await one.run("echo mine > mine", conversation_id=name)
    os.utime(HostFolder(overlays, "closed").journal, (0, 0))
    HostFolder(overlays, "closed").mark_deleted(0.0)
    await Deletion(memory_store).delete("closed", last_id=await log.load_last_id("closed"))
    (layer,) = (path for path in (overlays / ".node" / "layers").iterdir() if path.is_dir())
    os.utime(layer, (0, 0))
    reaper = Reaper(memory_store, overlays, 0.0)
    assert await reaper.sweep() == ["closed"]
    assert is_mounted(overlays / "kept" / "workspace")
    assert (overlays / "kept" / "workspace" / "src" / "link").read_text() == "one\n"
    remove_tree(overlays / "kept")
    assert await reaper.sweep() == []
    assert list((overlays / ".node" / "layers").iterdir()) == []


async def test_secrets_in_the_shell_are_not_saved(memory_store: Store, overlays: Path) -> None:
    secrets = Secrets(memory_store, lambda: bytes(32))
    log = EventLog(memory_store, secrets)
    await log.create(ConversationCreated(conversation_id=CID))
    await secrets.put(CID, "TOKEN", "correct-horse")
    async with prepared(log, overlays, "export KEPT=$TOKEN OTHER=plain") as one:
        assert (await log.read(CID))[1].command == "export KEPT=$TOKEN OTHER=plain"
        saved = Checkpoints(f"file://{overlays.parent}/place", SystemClock()).describe(CID)
        assert saved.shell_state is not None
        assert "OTHER=" in saved.shell_state.script
        assert "KEPT=" in saved.shell_state.script
        assert "correct-horse" not in saved.shell_state.script
        await fork(log, "fork")
        assert printed(await one.run("echo $OTHER", conversation_id="fork")) == "plain"


@pytest.mark.parametrize("script", ["exit 3", "kill -9 $$", "cd /; exec true", "unset PATH HOME"])
async def test_shell_state_of_a_hostile_agent_harms_its_forks_alone(log: EventLog, overlays: Path, script: str) -> None:
    """A state comes from the agent's own shell, so it may be anything."""
    async with prepared(log, overlays) as one:
        place = overlays.parent / "place"
        saved = Checkpoints(f"file://{place}", SystemClock())
        shell = ShellState(script, "/nowhere", "/workspace", 2)
        saved.save(CID, overlays / CID / "workspace", SavedFiles(), event=3, get_shell=lambda: shell)
        await fork(log, "fork")
        await one.run("true", conversation_id="fork")
        assert printed(await one.run("/bin/pwd; /bin/cat src/link", conversation_id="fork")).endswith("one")


async def until_locked(path: Path) -> None:
    """Wait until somebody waits for the lock of a file."""
    number = f":{path.stat().st_ino} "
    await until(lambda: any("->" in line and number in line for line in Path("/proc/locks").read_text().splitlines()))


async def test_save_that_waits_for_a_close_saves_all_files(log: EventLog, overlays: Path) -> None:
    async with prepared(log, overlays) as one:
        await fork(log, "fork")
        await one.run("echo mine > mine", conversation_id="fork")
        await one.executor.execute_control(CLOSE)
        with (overlays / "fork" / "saving.lock").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)  # another worker saves it
            saving = asyncio.create_task(one.checkpointing.save("fork"))
            await until_locked(overlays / "fork" / "saving.lock")
            detach(overlays / "fork")  # and then unmounts it
        saved = await saving
        assert saved is not None
        assert saved.files == 5


async def test_close_leaves_a_workspace_mounted_that_was_opened_meanwhile(log: EventLog, overlays: Path) -> None:
    async with prepared(log, overlays) as one:
        await fork(log, "fork")
        await one.run("true", conversation_id="fork")
        with (overlays / "fork" / "saving.lock").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            closing = asyncio.create_task(one.executor.execute_control(CLOSE))
            await until_locked(overlays / "fork" / "saving.lock")
            await one.run("echo mine > mine", conversation_id="fork")
        await closing
        assert is_mounted(overlays / "fork" / "workspace")
        assert await one.checkpointing.save("fork") is not None


@pytest.mark.parametrize("renames", [1, 2])
async def test_killed_removal_brings_back_no_outdated_files(log: EventLog, overlays: Path, renames: int) -> None:
    async with prepared(log, overlays) as one:
        await fork(log, "fork")
        await one.run("echo mine > mine", conversation_id="fork")
        await one.executor.execute_control(CLOSE)
        attach(overlays / "fork")
        (overlays / "fork" / "workspace" / "src" / "mine").write_text("outdated")
        done = subprocess.run([sys.executable, "-c", KILLED_REMOVAL, overlays / "fork", str(renames)], check=False)
        assert done.returncode == -signal.SIGKILL
        told = await one.run("cat src/mine", conversation_id="fork", moves=1)
        assert isinstance(told, ErrorObservation), told
        assert told.content.startswith("The files of this workspace were restored from the last checkpoint")
        assert printed(await one.run("cat src/mine", conversation_id="fork", moves=1)) == "mine"


async def test_fork_has_files_that_a_user_uploaded_last(valkey_store: Store, overlays: Path) -> None:
    """An upload is no event, so that the log does not show that the files of an earlier checkpoint are outdated."""
    log = EventLog(valkey_store)
    await log.create(ConversationCreated(conversation_id=CID))
    (overlays.parent / "sent").write_text("by hand")
    async with prepared(log, overlays) as one:
        await serve(one, valkey_store, WorkspaceFiles(valkey_store).upload(CID, overlays.parent / "sent", "src"))
        await fork(log, "fork")
        found = await one.run("cat sent", conversation_id="fork")
        assert printed(found) == "by hand"
        assert prefix(found).startswith(f"{SHARING} as they were saved after event 3, and so are")
        assert "Changes by users and background programs since then are not in them." in prefix(found)


async def test_close_during_a_comparison_hides_no_files(valkey_store: Store, overlays: Path) -> None:
    log = EventLog(valkey_store)
    await log.create(ConversationCreated(conversation_id=CID))

    async def close_and_get_sandbox() -> Sandbox:
        detach(overlays / "fork")
        return BubblewrapSandbox(overlays.parent / ".sandbox")

    async with prepared(log, overlays) as one:
        await fork(log, "fork")
        await one.run("true", conversation_id="fork")
        await one.executor.execute_control(CLOSE)
        asked = WorkspaceFiles(valkey_store).diff("fork")
        patch = await serve(one, valkey_store, asked, of="fork", sandbox=close_and_get_sandbox)
        assert b"+one" in patch


@pytest.mark.parametrize(("first", "moves"), [(True, 0), (True, 1), (False, 1)])
async def test_fork_is_told_when_its_unsaved_changes_are_lost(
    log: EventLog, overlays: Path, first: bool, moves: int
) -> None:
    async with prepared(log, overlays):
        await fork(log, "fork")
    place = overlays.parent / "place"
    if first:
        async with node(log, overlays, place, every=10) as lost:
            await lost.run("echo two > link", conversation_id="fork")
    else:  # its first action may have run, too
        await log.append("fork", [CmdRunAction(command="echo two > link")])
    async with node(log, overlays.parent / "other", place, every=10) as other:
        told = await other.run("true", conversation_id="fork", moves=moves)
        assert isinstance(told, ErrorObservation), told
        assert "that this one was forked from, as they were after event 3" in told.content


async def test_lost_layer_of_an_unsaved_fork_is_told(log: EventLog, overlays: Path) -> None:
    async with prepared(log, overlays):
        await fork(log, "fork")
    async with node(log, overlays, overlays.parent / "place", every=10) as one:
        await log.append("fork", [CmdRunAction(command="echo two > link")])
        action = (await log.read("fork"))[-1]
        assert await one.checkpointing.recover("fork", action.id) is None
        detach(overlays / "fork")
        remove_tree(overlays / ".node" / "layers")
        assert "as they were after event 3" in (await one.checkpointing.recover("fork", action.id) or "")


async def test_saved_shell_is_removed_once_the_fork_has_it(log: EventLog, overlays: Path) -> None:
    """Its exported variables may be secrets of the tenant."""
    async with prepared(log, overlays, "export TOKEN=correct-horse") as one:
        await fork(log, "fork")
        await log.append("fork", [CmdRunAction(command="true")])
        await one.checkpointing.recover("fork", (await log.read("fork"))[-1].id)
        assert find_files(overlays / "fork", b"correct-horse") == ["shell.json"]
        assert printed(await one.run("echo $TOKEN", conversation_id="fork")) == "correct-horse"
        assert "shell.json" not in find_files(overlays / "fork", b"correct-horse")


def find_files(folder: Path, content: bytes) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and content in path.read_bytes())
