"""What is in a workspace: its directories, regular files and symbolic links, read from outside of its sandbox.

Holds: no name that a program swaps meanwhile leads out, as each directory is opened in its parent without following
links; what is neither directory, file nor link is left out; the walk ends at its limits.
Does not: see one moment. What changes during the walk is seen as it was before or after.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tool_worker.beneath import Directory
from tool_worker.workspace_errors import WorkspaceTooLarge

DIRECTORY, FILE, LINK = "directory", "file", "link"
MAX_DEPTH = 128

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
    """

    path: str
    kind: str
    mode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    stamp: tuple[int, ...]
    target: str = ""


def entries(directory: Directory, limits: TreeLimits | None = None) -> Iterator[Entry]:
    """Yield all entries, each directory before what is in it, by name.

    Raises:
        WorkspaceTooLarge: beyond the limits.
        OSError: the directory itself cannot be read.
    """
    limits = limits or TreeLimits()
    total = 0
    for count, entry in enumerate(_walk(directory.descriptor, "", MAX_DEPTH), 1):
        total += entry.size if entry.kind == FILE else 0
        if count > limits.files:
            raise WorkspaceTooLarge(f"{directory.path} has more than {limits.files} files.")
        if total > limits.bytes:
            raise WorkspaceTooLarge(f"{directory.path} has more than {limits.bytes} bytes.")
        yield entry


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


def _walk(descriptor: int, prefix: str, depth: int) -> Iterator[Entry]:
    with os.scandir(descriptor) as scan:
        found = sorted(scan, key=lambda item: item.name)
    for item in found:
        try:
            status = item.stat(follow_symlinks=False)
            path = f"{prefix}{item.name}"
            if stat.S_ISDIR(status.st_mode):
                yield _entry(path, DIRECTORY, status)
                if depth > 0:
                    inner = os.open(item.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
                    try:
                        yield from _walk(inner, f"{path}/", depth - 1)
                    finally:
                        os.close(inner)
            elif stat.S_ISLNK(status.st_mode):
                yield _entry(path, LINK, status, os.readlink(item.name, dir_fd=descriptor))
            elif stat.S_ISREG(status.st_mode):
                yield _entry(path, FILE, status)
        except OSError as error:
            # Whoever removes or swaps an entry now has it left out.
            if not is_of_the_entry(error):
                raise


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
    )
