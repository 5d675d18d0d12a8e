"""Forks of a prepared workspace: they share its files, start with its shell, and survive kills in between."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.contract.events import ConversationCreated
from broker.contract.observations import ErrorObservation
from broker.log.deletion import Deletion
from broker.log.event_log import EventLog
from broker.runtime.clock import SystemClock
from broker.secrets.secrets import Secrets
from broker.store.store import Store
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
)
from tool_worker.worker.node.reaper import Reaper
from tool_worker.workspace import layers
from tool_worker.workspace.checkpoints.checkpoint_store import Checkpoints, SavedFiles
from tool_worker.workspace.files.overlay_mounts import is_mounted, unmount, unmount_below
from tool_worker.workspace.files.staging import remove_tree
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.launch.shell_state import ShellState
from tool_worker.workspace.layers import CopyMethod, Layers, attach, detach


@pytest.fixture(params=list(CopyMethod))
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a node whose forks get their files in one way."""
    method, root = request.param, tmp_path / "node"
    root.mkdir()
    if method is CopyMethod.OVERLAY and not can_mount(tmp_path / "trial"):
        pytest.skip("this process may not mount overlays")
    if method is CopyMethod.REFLINK:
        make_xfs(tmp_path / "disk", root)
    if method is not CopyMethod.OVERLAY:
        monkeypatch.setattr(layers, "_can_mount", lambda _: False)  # as without the right to
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


async def test_forks_start_with_files_shell_and_directory(log: EventLog, root: Path) -> None:
    async with prepared(log, root) as one:
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


async def test_fork_without_a_sandbox_keeps_its_own_paths(log: EventLog, root: Path) -> None:
    async with node(log, root, root.parent / "place", every=1, sandbox="none") as one:
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
        while not (overlays / CID / "workspace" / "src" / "begun").exists():
            await asyncio.sleep(0.02)
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
    assert Layers(overlays).remove_unused(keep_seconds=-1) == 0
    remove_tree(folder)
    assert Layers(overlays).remove_unused(keep_seconds=3600) == 0
    assert Layers(overlays).remove_unused(keep_seconds=-1) == 1
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
        assert saved.shell is not None
        assert "OTHER=" in saved.shell.script
        assert "KEPT=" in saved.shell.script
        assert "correct-horse" not in saved.shell.script
        await fork(log, "fork")
        assert printed(await one.run("echo $OTHER", conversation_id="fork")) == "plain"


@pytest.mark.parametrize("script", ["exit 3", "kill -9 $$", "cd /; exec true", "unset PATH HOME"])
async def test_shell_state_of_a_hostile_agent_harms_only_its_forks_shell(
    log: EventLog, overlays: Path, script: str
) -> None:
    """A state comes from the agent's own shell, so it may be anything."""
    async with prepared(log, overlays) as one:
        place = overlays.parent / "place"
        saved = Checkpoints(f"file://{place}", SystemClock())
        shell = ShellState(script, "/nowhere", "/workspace", 2)
        saved.save(CID, overlays / CID / "workspace", SavedFiles(), event=3, get_shell=lambda: shell)
        await fork(log, "fork")
        await one.run("true", conversation_id="fork")
        assert printed(await one.run("/bin/pwd; /bin/cat src/link", conversation_id="fork")).endswith("one")


def test_second_mount_of_the_same_changes_is_refused(overlays: Path) -> None:
    def restore(target: Path) -> None:
        target.mkdir()

    (overlays / "fork").mkdir()
    Layers(overlays).create_workspace("fork", "aa", CopyMethod.OVERLAY, restore)
    # As in another container, which shares the directory but not the mount.
    program = (
        f"from pathlib import Path; from tool_worker.workspace.layers import attach; attach(Path('{overlays}/fork'))"
    )
    script = f'umount --lazy {overlays}/fork/workspace && exec {sys.executable} -c "$1"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "WorkspaceUnavailable" in done.stderr
    assert "It is mounted in another container" in done.stderr
