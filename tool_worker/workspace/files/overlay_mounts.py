"""Mounts of overlay file systems: a read-only directory below, and a directory above it that gets all changes.

The layers are named by descriptors, so no character of a path and no link can change which directories are mounted.

Holds: a directory for changes is mounted once at a time on a machine, in whatever mount namespace (`index=on`).
Does not: mount without the right to (CAP_SYS_ADMIN over the mount namespace, as root has it).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

OPTIONS = "redirect_dir=on,index=on,metacopy=off"
"""`redirect_dir`: directories of the lower layer can be renamed, as npm does it."""

_MS_NOSUID, _MS_NODEV = 2, 4
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_LIBC = ctypes.CDLL(None, use_errno=True)


def mount_overlay(lower: Path, upper: Path, work: Path, target: Path) -> None:
    """Mount an overlay. Set-user-id bits and devices in it have no effect.

    Args:
        work: An empty directory on the file system of `upper`, for the kernel.

    Raises:
        OSError: EPERM without the right, EBUSY if `upper` is mounted already, ENOENT if a directory is missing.
    """
    with ExitStack() as closing:

        def open_directory(path: Path) -> str:
            descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            closing.callback(os.close, descriptor)
            return f"/proc/self/fd/{descriptor}"

        layers = f"lowerdir={open_directory(lower)},upperdir={open_directory(upper)},workdir={open_directory(work)}"
        place = open_directory(target)
        options = f"{layers},{OPTIONS}".encode()
        if _LIBC.mount(b"deckhands", place.encode(), b"overlay", _MS_NOSUID | _MS_NODEV, options):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(target))


def is_mounted(target: Path) -> bool:
    """Return whether another file system than that of the directory around it is mounted on a directory.

    Raises:
        OSError: The directory does not exist.
    """
    return target.stat(follow_symlinks=False).st_dev != target.parent.stat().st_dev


def unmount(target: Path, *, is_lazy: bool = False) -> bool:
    """Unmount a file system; return whether this was possible.

    Args:
        is_lazy: Also one that is in use. It leaves the tree at once, and ends with its last user.
    """
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if is_lazy else 0)
    return not _LIBC.umount2(os.fsencode(target), flags)


def unmount_below(directory: Path) -> None:
    """Unmount all overlays below a directory that is about to be moved or removed. Idempotent.

    Raises:
        OSError: One of them cannot be unmounted.
    """
    top = directory.resolve()
    for place in reversed([place for place in _iter_overlays() if place.is_relative_to(top)]):
        if not unmount(place) and not unmount(place, is_lazy=True):
            raise OSError(errno.EBUSY, "It cannot be unmounted", str(place))


def _iter_overlays() -> Iterator[Path]:
    """Yield the mount points of overlays in our mount namespace, outer ones first."""
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
            fields = line.split(b" ")
            if fields[fields.index(b"-") + 1] == b"overlay":
                # The kernel writes blanks and line breaks as octal numbers.
                yield Path(os.fsdecode(fields[4].decode("unicode_escape").encode("latin-1")))
