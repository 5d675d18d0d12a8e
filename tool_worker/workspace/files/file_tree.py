"""Lists the directories, regular files and symbolic links of a workspace, from outside its sandbox.

Holds: a name that a program swaps during the walk does not lead out, because the kernel opens each directory without
following links. Other kinds of entries are left out. The walk ends at its limits, and holds one descriptor.
Does not: take a consistent snapshot. An entry that changes during the walk is listed as before or after the change.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tool_worker.errors import WorkspaceTooLarge
from tool_worker.workspace.files.openat2_paths import Directory

SPECIAL_BITS = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX
DIRECTORY, FILE, LINK = "directory", "file", "link"
MAX_PATH_BYTES = 3072
"""Short enough that the workspace's own path plus an entry's path is still a path that the kernel accepts."""

_MACHINE_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO})


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Limits of a workspace that is copied.

    Attributes:
        files: Number of entries of every kind.
        bytes: Size of all regular files together; holes count as data.
    """

    files: int = 200_000
    bytes: int = 4 * 2**30


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One entry.

    Attributes:
        path: Relative, with `/`; bytes that are not UTF-8 become surrogates.
        kind: `directory`, `file` or `link`.
        mode: Permissions without set-user-id, set-group-id and sticky.
        stamp: Changes with the content: the file's device, inode, size, and both times.
        target: Target of a link.
        special_bits: The entry's set-user-id, set-group-id and sticky bits.
    """

    path: str
    kind: str
    mode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    stamp: tuple[int, ...]
    target: str = ""
    special_bits: int = 0


def iter_entries(
    directory: Directory, limits: TreeLimits | None = None, *, closed: list[str] | None = None
) -> Iterator[TreeEntry]:
    """Yield all entries sorted by name, each directory before its entries.

    Args:
        closed: Receives the directories that cannot be read for lack of permission.

    Raises:
        WorkspaceTooLarge: The workspace exceeds the limits, or is nested too deep.
        OSError: The directory itself cannot be read.
    """
    limits = limits or TreeLimits()
    total = 0
    for count, entry in enumerate(_walk(directory, [] if closed is None else closed), 1):
        total += entry.size if entry.kind == FILE else 0
        if count > limits.files:
            raise WorkspaceTooLarge(f"{directory.path} has more than {limits.files} files.")
        if total > limits.bytes:
            raise WorkspaceTooLarge(f"{directory.path} has more than {limits.bytes} bytes.")
        yield entry


def list_entries(directory: Directory) -> list[TreeEntry]:
    """Return the direct entries of a directory, sorted by name.

    Raises:
        OSError: The directory cannot be read.
    """
    return _list_directory(directory, "")


def measure(path: Path, limits: TreeLimits | None = None) -> tuple[int, int]:
    """Return the number of entries and the bytes of all regular files. Raises the same errors as `entries`."""
    count = total = 0
    with Directory(path) as directory:
        for entry in iter_entries(directory, limits):
            count += 1
            total += entry.size if entry.kind == FILE else 0
    return count, total


def is_entry_error(error: OSError) -> bool:
    """Return whether an error comes from a change of the entry, rather than from scarce resources of the machine."""
    return error.errno not in _MACHINE_ERRORS


class TemporaryAccess:
    """Makes unreadable entries readable for their owner, and restores their permissions on exit.

    Attributes:
        modes: The previous permissions of each path.
    """

    def __init__(self, directory: Directory) -> None:
        self.modes: dict[str, int] = {}
        self._directory = directory

    def grant(self, paths: list[str]) -> None:
        """Make directories and files readable.

        Raises:
            PermissionError: One of them has another owner.
        """
        for path in paths:
            with suppress(FileNotFoundError), self._open_entry(path) as (name, mode):
                if mode & 0o500 == 0o500:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
                Path(name).chmod(mode | 0o500)
                self.modes.setdefault(path, mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore all permissions."""
        for path, mode in reversed(self.modes.items()):
            with suppress(OSError), self._open_entry(path) as (name, _now):
                Path(name).chmod(mode)

    @contextmanager
    def _open_entry(self, path: str) -> Iterator[tuple[str, int]]:
        """Yield a /proc path that stays tied to this entry, and the entry's permissions."""
        descriptor = self._directory.open(path, os.O_PATH | os.O_NOFOLLOW, follows_links=False)
        try:
            yield f"/proc/self/fd/{descriptor}", stat.S_IMODE(os.fstat(descriptor).st_mode)
        finally:
            os.close(descriptor)


def _walk(directory: Directory, closed: list[str]) -> Iterator[TreeEntry]:
    levels = [iter(_list_directory(directory, ""))]
    while levels:
        entry = next(levels[-1], None)
        if entry is None:
            levels.pop()
            continue
        yield entry
        if entry.kind == DIRECTORY:
            try:
                levels.append(iter(_list_directory(directory, entry.path)))
            except PermissionError:
                closed.append(entry.path)
            except OSError as error:
                if not is_entry_error(error):  # an entry that was removed or replaced is left out
                    raise


def _list_directory(directory: Directory, path: str) -> list[TreeEntry]:
    """Return a directory's entries, sorted by name; entries that are removed meanwhile are left out."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise WorkspaceTooLarge(f"{directory.path} has paths of more than {MAX_PATH_BYTES:,} bytes.")
    prefix = f"{path}/" if path else ""
    listed: list[TreeEntry] = []
    descriptor = directory.open(path or ".", os.O_RDONLY | os.O_DIRECTORY, follows_links=False)
    try:
        with os.scandir(descriptor) as scan:
            found = sorted(scan, key=lambda item: item.name)
        for item in found:
            try:
                listed += _find_entry(item, f"{prefix}{item.name}", descriptor)
            except PermissionError:
                raise  # of the directory, which may be readable but not searchable
            except OSError as error:
                if not is_entry_error(error):
                    raise
    finally:
        os.close(descriptor)
    return listed


def _find_entry(item: os.DirEntry[str], path: str, descriptor: int) -> Iterator[TreeEntry]:
    status = item.stat(follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        yield _make_entry(path, DIRECTORY, status)
    elif stat.S_ISLNK(status.st_mode):
        yield _make_entry(path, LINK, status, os.readlink(item.name, dir_fd=descriptor))
    elif stat.S_ISREG(status.st_mode):
        yield _make_entry(path, FILE, status)


def _make_entry(path: str, kind: str, status: os.stat_result, target: str = "") -> TreeEntry:
    stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return TreeEntry(
        path=path,
        kind=kind,
        mode=stat.S_IMODE(status.st_mode) & 0o777,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        stamp=stamp,
        target=target,
        special_bits=status.st_mode & SPECIAL_BITS,
    )
