"""What is in a workspace: its directories, regular files and symbolic links, read from outside of its sandbox.

Holds: no name that a program swaps meanwhile leads out, as the kernel opens each directory without following links;
what is neither directory, file nor link is left out; the walk ends at its limits, and holds one descriptor.
Does not: see one moment. What changes during the walk is seen as it was before or after.
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
"""With the path of the workspace before it, a path of an entry still is one that the kernel takes."""

_OF_THE_MACHINE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO})


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """How much a workspace may hold to be taken along.

    Attributes:
        files: entries of every kind.
        bytes: of all regular files together, holes counted as they are.
    """

    files: int = 200_000
    bytes: int = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry.

    Attributes:
        path: relative, with `/`; bytes that are no UTF-8 as surrogates.
        kind: `directory`, `file` or `link`.
        mode: permissions, without set-user-id and its like.
        stamp: changes when the content does: device, number, size, and both times of the file.
        target: of a link.
        special_bits: those of set-user-id, set-group-id and sticky that it has.
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


def entries(
    directory: Directory, limits: TreeLimits | None = None, *, closed: list[str] | None = None
) -> Iterator[Entry]:
    """Yield all entries, each directory before what is in it, by name.

    Args:
        closed: gets the directories that could not be looked into, for want of a permission.

    Raises:
        WorkspaceTooLarge: beyond the limits, or nested too deep.
        OSError: the directory itself cannot be read.
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


def listed(directory: Directory) -> list[Entry]:
    """Return what is in a directory itself, by name.

    Raises:
        OSError: it cannot be read.
    """
    return _listed(directory, "")


def measure(path: Path, limits: TreeLimits | None = None) -> tuple[int, int]:
    """Return how many entries a workspace has, and how many bytes its regular files; raises what `entries` does."""
    count = total = 0
    with Directory(path) as directory:
        for entry in entries(directory, limits):
            count += 1
            total += entry.size if entry.kind == FILE else 0
    return count, total


def is_of_the_entry(error: OSError) -> bool:
    """Say whether an entry cannot be read because of what has become of it, and not for what the machine lacks."""
    return error.errno not in _OF_THE_MACHINE


class OpenedUp:
    """What the owner of a workspace, who is us, has closed to himself, and can read for a while.

    Attributes:
        modes: the permissions that each path had before.
    """

    def __init__(self, directory: Directory) -> None:
        self.modes: dict[str, int] = {}
        self._directory = directory

    def open(self, paths: list[str]) -> None:
        """Open directories and files.

        Raises:
            PermissionError: one is not ours.
        """
        for path in paths:
            with suppress(FileNotFoundError), self._found(path) as (name, mode):
                if mode & 0o500 == 0o500:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
                Path(name).chmod(mode | 0o500)
                self.modes.setdefault(path, mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close all again."""
        for path, mode in reversed(self.modes.items()):
            with suppress(OSError), self._found(path) as (name, _now):
                Path(name).chmod(mode)

    @contextmanager
    def _found(self, path: str) -> Iterator[tuple[str, int]]:
        """Yield a name by which the kernel knows this very entry, and its permissions."""
        descriptor = self._directory.open(path, os.O_PATH | os.O_NOFOLLOW, follows_links=False)
        try:
            yield f"/proc/self/fd/{descriptor}", stat.S_IMODE(os.fstat(descriptor).st_mode)
        finally:
            os.close(descriptor)


def _walk(directory: Directory, closed: list[str]) -> Iterator[Entry]:
    levels = [iter(_listed(directory, ""))]
    while levels:
        entry = next(levels[-1], None)
        if entry is None:
            levels.pop()
            continue
        yield entry
        if entry.kind == DIRECTORY:
            try:
                levels.append(iter(_listed(directory, entry.path)))
            except PermissionError:
                closed.append(entry.path)
            except OSError as error:
                if not is_of_the_entry(error):  # an entry that is removed or replaced now is left out
                    raise


def _listed(directory: Directory, path: str) -> list[Entry]:
    """Return what is in a directory, by name; what is removed meanwhile is left out."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise WorkspaceTooLarge(f"{directory.path} has paths of more than {MAX_PATH_BYTES:,} bytes.")
    prefix = f"{path}/" if path else ""
    listed: list[Entry] = []
    descriptor = directory.open(path or ".", os.O_RDONLY | os.O_DIRECTORY, follows_links=False)
    try:
        with os.scandir(descriptor) as scan:
            found = sorted(scan, key=lambda item: item.name)
        for item in found:
            try:
                listed += _seen(item, f"{prefix}{item.name}", descriptor)
            except PermissionError:
                raise  # of the directory, which may be read and not entered
            except OSError as error:
                if not is_of_the_entry(error):
                    raise
    finally:
        os.close(descriptor)
    return listed


def _seen(item: os.DirEntry[str], path: str, descriptor: int) -> Iterator[Entry]:
    status = item.stat(follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        yield _entry(path, DIRECTORY, status)
    elif stat.S_ISLNK(status.st_mode):
        yield _entry(path, LINK, status, os.readlink(item.name, dir_fd=descriptor))
    elif stat.S_ISREG(status.st_mode):
        yield _entry(path, FILE, status)


def _entry(path: str, kind: str, status: os.stat_result, target: str = "") -> Entry:
    stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return Entry(
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
