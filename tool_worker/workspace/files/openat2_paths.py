"""Opens files of a workspace from outside its sandbox, while programs in it may change any name at any moment.

Holds:
    - No path leads out of the directory: neither by `..`, nor by a symbolic link, nor by a link created between a check
      and an open. The kernel resolves and refuses in one step (`openat2`, RESOLVE_BENEATH).
    - Only regular files are read; no call blocks on a FIFO.
Does not: protect against hard links, which lead out only if a program outside of the workspace creates them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from broker.runtime import open_beneath
from tool_worker.errors import FileUnfit

_CHUNK_BYTES = 2**20


class Directory:
    """A directory opened once: later changes of its path have no effect.

    Raises:
        OSError: The directory cannot be opened, or is a link; links in the path before it are followed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    @classmethod
    def open_without_links(cls, path: Path) -> Self:
        """Open a directory by an absolute path without any link in it.

        Raises:
            OSError: `ELOOP` if the path contains a link; see `open`.
        """
        directory = object.__new__(cls)
        directory.path = path
        with Directory(Path("/")) as top:
            name = str(path.relative_to("/"))
            directory.descriptor = top.open(name, os.O_RDONLY | os.O_DIRECTORY, follows_links=False)
        return directory

    @classmethod
    def open_inside(cls, outer: Directory, path: str) -> Self:
        """Open a directory below another one; follows links that stay below it.

        Raises:
            OSError: See `open`.
        """
        directory = object.__new__(cls)
        directory.path = outer.path / path
        directory.descriptor = outer.open(path, os.O_RDONLY | os.O_DIRECTORY)
        return directory

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode number, unique while the directory is open here."""
        found = os.fstat(self.descriptor)
        return found.st_dev, found.st_ino

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)

    def open(self, path: str, flags: int, mode: int = 0, *, follows_links: bool = True) -> int:
        """Open an entry below the directory and return its descriptor.

        Args:
            path: Relative to the directory.
            follows_links: Whether symbolic links that stay below the directory are followed.

        Raises:
            OSError: `EXDEV` if the path leads out, `ELOOP` if it contains a link that may not be followed, or any error
                of `os.open`.
        """
        try:
            return open_beneath(self.descriptor, path, flags, mode, follows_links=follows_links)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise OSError(errno.EXDEV, "the path leads out of the workspace", path) from None

    @contextmanager
    def open_file(self, path: str, *, follows_links: bool = True) -> Iterator[int]:
        """Open a regular file for reading.

        Raises:
            FileUnfit: The entry is not a regular file.
            OSError: See `open`.
        """
        descriptor = self.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, follows_links=follows_links)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FileUnfit(f"{path} is not a regular file.")
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, path: str, limit_bytes: int, *, follows_links: bool = True) -> bytes:
        """Return the content of a regular file.

        Raises:
            FileUnfit: The entry is not a regular file, or is larger than the limit.
            OSError: See `open`.
        """
        chunks, missing = [], limit_bytes + 1
        with self.open_file(path, follows_links=follows_links) as descriptor:
            while missing > 0 and (chunk := os.read(descriptor, min(missing, _CHUNK_BYTES))):
                chunks.append(chunk)
                missing -= len(chunk)
        if missing == 0:
            raise FileUnfit(f"{path} has more than {limit_bytes} bytes.")
        return b"".join(chunks)
