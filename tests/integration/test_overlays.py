"""Overlays of forks when workers race, die or lack something, and when their files were damaged meanwhile."""

from __future__ import annotations

import math
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.checkpoint_nodes import node_with_overlays
from tool_worker.errors import WorkspaceUnavailable
from tool_worker.workspace.bindings import Bindings
from tool_worker.workspace.files.overlay_mounts import is_mounted
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.layers import CopyMethod, LayerLost, Layers, attach, detach
from tool_worker.workspace.named_directories import NamedDirectories

ROUNDS = 200


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """The directory of a node with the workspace of a fork."""
    with node_with_overlays(tmp_path) as root:
        (root / "fork").mkdir()

        def restore(target: Path) -> None:
            target.mkdir()
            (target / "file").write_text("one")

        Layers(root).create_workspace("fork", "aa", CopyMethod.OVERLAY, restore)
        yield root


def repeat_in_threads(*works: Callable[[], object]) -> None:
    """Repeat each work in a separate thread, and raise the first error."""

    def repeat(work: Callable[[], object]) -> None:
        for _ in range(ROUNDS):
            work()

    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(repeat, work) for work in works]:
            done.result()


def test_concurrent_attaches_and_detaches_disturb_no_other(root: Path) -> None:
    folder = root / "fork"
    repeat_in_threads(*[lambda: attach(folder)] * 2, lambda: detach(folder))


def test_opened_workspace_is_never_the_mount_point_below(root: Path) -> None:
    bindings, folder = Bindings(root, NamedDirectories()), HostFolder(root, "fork")

    def read() -> None:
        with bindings.open(folder) as directory:
            assert [*Path(f"/proc/self/fd/{directory.descriptor}").iterdir()] != []

    repeat_in_threads(read, read, lambda: detach(root / "fork"))


def test_unreadable_note_keeps_the_layer(root: Path) -> None:
    """An error of reading, here ELOOP, is not the proof that there is no layer."""
    (note,) = (root / "fork").rglob("layer.json")
    detach(root / "fork")
    kept = note.rename(root / "kept")
    note.symlink_to(note)
    with pytest.raises(OSError, match="Too many levels"):
        Layers(root).remove_unused(math.inf)
    with pytest.raises(WorkspaceUnavailable, match="Too many levels"):
        attach(root / "fork")
    kept.rename(note)
    attach(root / "fork")
    assert (root / "fork" / "workspace" / "file").read_text() == "one"


@pytest.mark.parametrize("left", ["", "{", None])
def test_power_cut_that_destroys_the_note_is_noticed(root: Path, left: str | None) -> None:
    (note,) = (root / "fork").rglob("layer.json")
    detach(root / "fork")
    note.unlink()
    if left is not None:
        note.write_text(left)
    with pytest.raises(LayerLost, match="names no layer"):
        attach(root / "fork")


def test_record_is_on_the_disk_before_the_mount(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        assert not (root / "second" / "workspace").exists()
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    (root / "second").mkdir()
    Layers(root).create_workspace("second", "aa", CopyMethod.OVERLAY, Path.mkdir)
    assert synced == ["layer.json", "overlay", "second"]


def test_layer_that_was_replaced_by_a_copy_is_lost(root: Path) -> None:
    """The kernel refuses the changes above other inodes (ESTALE), as those of a restored backup or another disk."""
    (root / "fork" / "workspace" / "file").write_text("two")
    detach(root / "fork")
    layer = root / ".node" / "layers" / "aa"
    shutil.copytree(layer, root / "copy")
    layer.rename(root / "old")
    (root / "copy").rename(layer)
    with pytest.raises(LayerLost, match="is not the one"):
        attach(root / "fork")


def test_passing_error_of_the_first_try_is_not_remembered(tmp_path: Path, root: Path) -> None:
    layers = Layers(root)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(tmp_path, os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 3, hard))
    try:
        assert layers.find_method() is CopyMethod.COPY
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert layers.find_method() is CopyMethod.OVERLAY


def test_second_mount_of_the_same_changes_is_refused(root: Path) -> None:
    # As in another container, which shares the directory but not the mount.
    program = f"from pathlib import Path; from tool_worker.workspace.layers import attach; attach(Path('{root}/fork'))"
    script = f'umount --lazy {root}/fork/workspace && exec {sys.executable} -c "$1"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "WorkspaceUnavailable" in done.stderr
    assert "It is mounted in another container" in done.stderr
    assert is_mounted(root / "fork" / "workspace")
