"""Layers: the files of a checkpoint on one node, shared by the workspaces of all forks that start with them.

    <root>/.node/layers/<id>/tree       the files, read-only by agreement; the id is a hash of the checkpoint's content
    <root>/.node/layers/<id>.lock       held while the layer is being made
    <root>/<conversation>/overlay/      upper/: the changes of the workspace; work/: the kernel's; layer.json: the layer
                                        of the workspace. This file is the reference that keeps the layer

A workspace with a layer is an overlay: the layer with the changes above it, mounted at its usual path. So all readers
see the merged tree. Where the node may not mount, a workspace is a copy that shares the blocks of the layer's files
(reflinks), and where the file system has none, an ordinary copy without a layer.

Holds:
    - A layer appears whole or not at all, and is removed as a whole. It is removed only if no workspace names it, also
      if workers are killed: references are found by reading them, and are not counted.
    - Nothing of a workspace can reach the directories of the overlay: programs and readers see only the merged tree.
      Layers come from checkpoints, which have directories, regular files and links alone: no whiteout, no device and no
      extended attribute.
    - The workspace's directory is not used unmounted: `open_workspace` mounts it again, such as after a restart of the
      machine, and it stays mounted while the opened directory is in use.
    - The folder `overlay` appears whole, and goes as a whole. While it is there, the workspace has a layer. Its lock is
      held while the workspace is mounted, unmounted or moved away.
    - A layer counts as missing only if it is missing: an error of reading changes and removes nothing.
Does not: mount for sandboxes that have processes in other mount namespaces, such as containers (they get copies).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path

from tool_worker.errors import WorkspaceLost, WorkspaceUnavailable
from tool_worker.workspace.files.openat2_paths import Directory
from tool_worker.workspace.files.overlay_mounts import is_mounted, mount_overlay, unmount, unmount_below
from tool_worker.workspace.files.staging import create_staging, move_into_place, remove_staging

NODE_FOLDER = ".node"
"""The folder for the locks and the layers of the whole node, beside the folders of conversations."""
LAYERS, TREE = "layers", "tree"
WORKSPACE, NOTE, OVERLAY, UPPER, WORK = "workspace", "layer.json", "overlay", "upper", "work"
PARTS = (WORKSPACE, OVERLAY)
"""The entries of a conversation's folder that make up a workspace with a layer; see `move_away` for their order."""
KEEP_SECONDS = 3600.0
"""How long an unused layer is kept: the next fork may need it."""
_FICLONE = 0x40049409
_LASTING_ERRORS = {
    *(errno.EPERM, errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP),
    *(errno.ENOSYS, errno.ENODEV, errno.ENOTTY, errno.EXDEV),
}
"""The errors of a kernel, a file system or missing rights; others, such as those of a full disk, may pass."""

_log = logging.getLogger(__name__)


class CopyMethod(StrEnum):
    """How the workspace of a fork gets its files."""

    OVERLAY = "overlay"
    REFLINK = "reflink"
    COPY = "copy"


COPY_NOTICES = {
    CopyMethod.OVERLAY: "forks share files by overlay mounts",
    CopyMethod.REFLINK: "forks share files by reflinks, because overlays cannot be mounted for them",
    CopyMethod.COPY: (
        "each fork copies all files: overlays cannot be mounted for them, and the file system has no reflinks. "
        "Run tool workers as root, or put DECKHANDS_NODE_DIR on XFS or Btrfs"
    ),
}


class LayerLost(WorkspaceLost):
    """The layer of a workspace is gone, and so are the files that the workspace has not changed."""


class Layers:
    """The layers of one node. All calls block.

    Args:
        root: Directory of the node's workspaces.
        may_mount: Whether overlays may be mounted where this is possible.
    """

    def __init__(self, root: Path, *, may_mount: bool = True) -> None:
        self._root = root.absolute()
        self._may_mount = may_mount
        self._folder = self._root / NODE_FOLDER / LAYERS
        self._methods: dict[bool, CopyMethod] = {}

    def find_method(self, *, may_mount: bool = True) -> CopyMethod:
        """Return how forks get their files here, by trying it until a try shows it.

        Args:
            may_mount: Whether the programs of the workspace see mounts of this process.
        """
        if may_mount not in self._methods:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with create_staging(self._folder) as staging:
                    method = find_copy_method(staging, may_mount=may_mount and self._may_mount)
            except OSError as error:
                _log.warning("in %s, a fork copies all files: %s", self._root, error)
                return CopyMethod.COPY
            if method is not CopyMethod.OVERLAY:
                _log.warning("in %s, %s", self._root, COPY_NOTICES[method])
            self._methods[may_mount] = method
        return self._methods[may_mount]

    def create_workspace(
        self, conversation_id: str, layer: str, method: CopyMethod, restore: Callable[[Path], object]
    ) -> None:
        """Create the workspace of a fork.

        Args:
            layer: Identifies the files: equal layers have equal files.
            method: From `find_method`; not an ordinary copy.
            restore: Writes the files as a new directory; called if the node does not have the layer.

        Raises:
            FileExistsError: Another worker has created the workspace.
            OSError, WorkspaceUnavailable: It cannot be created. Nothing of it is used until the next call.
        """
        folder = self._root / conversation_id
        with self._hold():
            tree = self._make_layer(layer, restore)
            with create_staging(folder) as staging:
                if method is CopyMethod.REFLINK:
                    copy_by_reflinks(tree, staging / WORKSPACE)
                    move_into_place(staging / WORKSPACE, folder / WORKSPACE)
                    return
                if (folder / WORKSPACE).exists():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder / WORKSPACE))
                draft = staging / OVERLAY
                for name in (UPPER, WORK):
                    (draft / name).mkdir(mode=0o700, parents=True)
                (draft / NOTE).write_text(json.dumps({"layer": layer}))
                _sync(draft / NOTE)
                _sync(draft)
                move_into_place(draft, folder / OVERLAY)
                _sync(folder)
            # From now on, `attach` completes what a killed worker has left undone.
            attach(folder)

    def remove_unused(self, before: float) -> int:
        """Remove the layers that no workspace names, and return how many. Idempotent.

        Args:
            before: Only those whose last use was not after this timestamp.

        Raises:
            OSError: A workspace's layer cannot be read; nothing was removed.
        """
        if not self._folder.is_dir():
            return 0
        remove_staging(self._folder)
        with create_staging(self._root / NODE_FOLDER) as doomed, self._hold(is_alone=True) as is_held:
            if not is_held:
                return 0  # a fork is being made
            used = {_read_layer(folder) for folder in self._root.iterdir()}
            unused = [
                path
                for path in self._folder.iterdir()
                if path.is_dir() and path.name not in used and path.stat().st_mtime <= before
            ]
            for path in unused:
                path.rename(doomed / path.name)
                path.with_suffix(".lock").unlink(missing_ok=True)
        return len(unused)

    def _make_layer(self, layer: str, restore: Callable[[Path], object]) -> Path:
        """Return the files of a layer, made if needed. The caller holds the folder."""
        place = self._folder / layer
        lock = os.open(place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not place.is_dir():
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.is_dir():
                with create_staging(self._folder) as staging:
                    draft = staging / layer
                    draft.mkdir(mode=0o700)
                    restore(draft / TREE)
                    _write_to_disk(draft)  # forks of later days rely on it, whatever ends this machine
                    draft.rename(place)
                    _sync(self._folder)
            os.utime(place)
        finally:
            os.close(lock)
        return place / TREE

    @contextmanager
    def _hold(self, *, is_alone: bool = False) -> Iterator[bool]:
        """Keep layers from being removed; alone: keep all others from using them, or yield False if there are any."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield _lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB if is_alone else fcntl.LOCK_SH)
        finally:
            os.close(lock)


def attach(folder: Path) -> None:
    """Mount the workspace of a conversation if it has a layer and is not mounted. Cheap, and idempotent.

    Args:
        folder: The folder of the conversation.

    Raises:
        LayerLost: The layer is gone.
        WorkspaceUnavailable: It cannot be mounted by this process.
    """
    with _hold_overlay(folder) as has_layer:
        if has_layer:
            _mount(folder)


def open_workspace(folder: Path) -> Directory:
    """Open the workspace of a conversation; `detach` leaves it mounted until it is closed.

    Raises:
        LayerLost, WorkspaceUnavailable: See `attach`.
        OSError: The directory does not exist, or cannot be opened.
    """
    with _hold_overlay(folder) as has_layer:
        if has_layer:
            _mount(folder)
        return Directory(folder / WORKSPACE)


def detach(folder: Path) -> None:
    """Unmount the workspace of a conversation unless it is in use; `attach` mounts it again. Idempotent."""
    with _hold_overlay(folder) as has_layer:
        workspace = folder / WORKSPACE
        if has_layer and workspace.is_dir() and is_mounted(workspace):
            unmount(workspace)


def is_present(folder: Path) -> bool:
    """Return whether a conversation has a workspace here, mounted or not."""
    return any((folder / name).is_dir() for name in PARTS)


def move_away(folder: Path, target: Path) -> None:
    """Move a workspace, with or without a layer, out of the folder of its conversation. Its processes have ended.

    If this is interrupted, the workspace is still present, and mounted at its next use: with a layer, the last rename
    removes it.

    Raises:
        OSError: It cannot be moved.
    """
    with _hold_overlay(folder):
        unmount_below(folder)
        for name in PARTS:
            with suppress(FileNotFoundError):
                (folder / name).rename(target / name)


def find_copy_method(directory: Path, *, may_mount: bool = True) -> CopyMethod:
    """Return how directories on this file system can share files, by trying it in an empty directory.

    Raises:
        OSError: The try failed for a reason that may pass.
    """
    if may_mount and _can_mount(directory):
        return CopyMethod.OVERLAY
    return CopyMethod.REFLINK if _can_clone(directory) else CopyMethod.COPY


def copy_by_reflinks(source: Path, target: Path) -> None:
    """Copy a tree to a new directory that shares the blocks of its files.

    Raises:
        OSError: The file system cannot do this, or is full.
    """
    command = ["cp", "-a", "--reflink=always", "--no-target-directory", "--", str(source), str(target)]
    done = subprocess.run(command, check=False, capture_output=True, env={})  # noqa: S603
    if done.returncode:
        text = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
        raise OSError(errno.EIO, text or "cp failed", str(target))


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _hold_overlay(folder: Path) -> Iterator[bool]:
    """Hold the overlay of a workspace against other users, and yield whether it has one."""
    lock = _lock_overlay(folder / OVERLAY)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _lock_overlay(overlay: Path) -> int | None:
    """Return a descriptor with the lock of an overlay; None if there is no overlay."""
    while True:
        try:
            lock = os.open(overlay, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _make_unavailable(overlay.with_name(WORKSPACE), error) from error
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if overlay.stat().st_ino == os.fstat(lock).st_ino:
                return lock
        os.close(lock)  # it was moved away meanwhile


def _mount(folder: Path) -> None:
    """Mount a workspace with a layer unless it is mounted; the caller holds it."""
    workspace, overlay = folder / WORKSPACE, folder / OVERLAY
    try:
        workspace.mkdir(mode=0o700, exist_ok=True)
        if is_mounted(workspace):
            return
        layer = _read_layer(folder)
        if not layer:
            raise LayerLost(f"The overlay {overlay} names no layer.")
        tree = folder.parent / NODE_FOLDER / LAYERS / layer / TREE
        mount_overlay(tree, overlay / UPPER, overlay / WORK, workspace)
    except FileNotFoundError as error:
        raise LayerLost(f"A part of the workspace {workspace} is gone: {error}.") from error
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise LayerLost(f"The layer of the workspace {workspace} is not the one it was made with.") from error
        raise _make_unavailable(workspace, error) from error


def _make_unavailable(workspace: Path, error: OSError) -> WorkspaceUnavailable:
    remedies = {
        errno.EBUSY: "It is mounted in another container: stop the tool worker there.",
        errno.EPERM: "Start the tool worker with the right to mount, as when the workspace was made.",
    }
    return WorkspaceUnavailable(
        f"The workspace {workspace} is an overlay that cannot be mounted: {error.strerror}.",
        remedy=remedies.get(error.errno or 0, "Try again; if it stays so, see the kernel's log."),
    )


def _read_layer(folder: Path) -> str:
    """Return the layer of a conversation's workspace, or "".

    Raises:
        OSError: It cannot be read.
    """
    try:
        layer = json.loads((folder / OVERLAY / NOTE).read_text())["layer"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return ""
    return layer if isinstance(layer, str) and layer.isalnum() else ""


def _check_lasting(error: OSError) -> None:
    """Raise the error of a try if it may pass."""
    if error.errno not in _LASTING_ERRORS:
        raise error


def _can_mount(directory: Path) -> bool:
    """Try an overlay: some file systems, and user namespaces, cannot rename directories or lack a part of it."""
    below, above, work, merged = (directory / name for name in ("below", "above", "work", "merged"))
    try:
        for path in (below / "folder", above, work, merged):
            path.mkdir(parents=True)
        (below / "folder" / "file").touch()
        mount_overlay(below, above, work, merged)
    except OSError as error:
        _check_lasting(error)
        return False
    try:
        (merged / "folder").rename(merged / "renamed")
        (merged / "renamed" / "file").unlink()
        return not any((merged / "renamed").iterdir()) and (below / "folder" / "file").exists()
    except OSError as error:
        _check_lasting(error)
        return False
    finally:
        unmount_below(directory)


def _can_clone(directory: Path) -> bool:
    try:
        with (directory / "one").open("wb") as one, (directory / "two").open("wb") as two:
            one.write(b"deckhands")
            one.flush()
            fcntl.ioctl(two.fileno(), _FICLONE, one.fileno())
    except OSError as error:
        _check_lasting(error)
        return False
    return True


def _write_to_disk(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ctypes.CDLL(None).syncfs(descriptor)
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    """Return when a file or the entries of a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
