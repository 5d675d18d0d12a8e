"""Directories that are hard to handle, and a user without rights."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files by their relative paths, with the directories in between; return the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def let_everybody_through(folder: Path) -> None:
    """Let other users into a directory, which those around it may forbid, each by itself."""
    for path in (folder, *folder.parents):
        if path.stat().st_mode & 0o005 != 0o005:
            path.chmod(0o755)


def is_open_to_all(path: Path) -> bool:
    """Return whether other users may read a path; the directories around it may forbid it."""
    return bool(path.stat().st_mode & 0o004) and all(parent.stat().st_mode & 0o001 for parent in path.parents)


@contextmanager
def without_rights(own: Path) -> Iterator[None]:
    """Run as a user who is subject to permissions and owns a directory."""
    if os.getuid() != 0:
        yield
        return
    let_everybody_through(own.parent)
    os.chown(own, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def cleared(top: Path) -> Iterator[None]:
    """Remove a directory at the end, even one deeper than the tests' own cleanup can reach."""
    try:
        yield
    finally:
        subprocess.run(["rm", "-rf", "--", str(top)], check=False)


@contextmanager
def nested(top: Path, levels: int) -> Iterator[None]:
    """Put directories into each other; all goes at the end."""
    with cleared(top):
        descriptor = os.open(top, os.O_RDONLY)
        for _ in range(levels):
            os.mkdir("d", dir_fd=descriptor)
            inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        os.close(descriptor)
        yield
