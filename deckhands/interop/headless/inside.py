"""Files below a directory that an agent may have modified, accessed from outside its sandbox.

Holds: no path leads out of the directory, neither by `..` nor by a link, even one that is created meanwhile; a file is
replaced as a whole; no call waits for a FIFO; files created by root belong to the owner of the directory.
Does not: follow links that stay inside, or create the directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import posixpath
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from broker.runtime import DeckhandsError, UsageError

MAX_READ_BYTES = 16 * 2**20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class PathDenied(UsageError):
    """A path leads out of the workspace."""

    code = "path_denied"


def path_inside(root: Path, text: str, *, what: str) -> str:
    """Return a path relative to a directory; a relative path is taken as relative to it.

    Raises:
        PathDenied: the path leads out of the directory, or is the directory itself.
    """
    found = posixpath.normpath(posixpath.relpath(text, root) if posixpath.isabs(text) else text or ".")
    if found == "." or found.split("/")[0] == ".." or "\0" in found:
        raise PathDenied(
            f"{what} is {ascii(text)[:300]}, which is not inside the workspace {root}.",
            remedy="Name a path below the workspace.",
        )
    return found


def locate(root: Path, text: str, name: str) -> tuple[Path, str]:
    """Return the directory below which the command writes a file named by the user, and the path in it.

    If the path leads into the workspace, even by links, this is the workspace, below which no link is followed. The
    directory of any other path is created.

    Args:
        root: the workspace; relative paths are relative to it.
        text: a file, or an existing directory.
        name: the name of the file if the path is a directory.

    Raises:
        PathDenied: the path is the workspace itself.
        UsageError: the directory cannot be created or written.
    """
    path = Path(os.path.normpath(root / Path(text).expanduser()))
    workspace = root.resolve()
    if path.is_relative_to(root):
        return root, path_inside(root, str(path), what="SAVE_TRAJECTORY_PATH")
    try:
        if path.is_dir():
            path = path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = path.parent.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{path} cannot be written: {error}.", remedy="Name another file.") from error
    if folder.is_relative_to(workspace):
        return root, str(folder.relative_to(workspace) / path.name)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{path} cannot be written: {folder} cannot be changed.", remedy="Name another file.")
    return folder, path.name


class Inside:
    """The files below a directory, which must exist. Paths are relative to it, as `path_inside` returns them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, content: bytes) -> None:
        """Write a whole file, and create its folders.

        Raises:
            PathDenied: a part of the path is a link, or not a folder.
            DeckhandsError: the file cannot be written.
        """
        with self._open_folder(path) as (folder, name):
            temporary = f".{name[:100]}.{secrets.token_hex(6)}"
            with os.fdopen(self._new(temporary, folder), "wb") as file:
                file.write(content)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)

    def create(self, path: str) -> BinaryIO:
        """Open a new file for writing, replacing an existing one; raises the errors of `write`."""
        with self._open_folder(path) as (folder, name):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            return os.fdopen(self._new(name, folder), "wb")

    def make(self, path: str) -> None:
        """Create a folder and its parents; raises the errors of `write`."""
        with self._open_folder(f"{path}/."):
            return

    def read(self, path: str) -> bytes | None:
        """Return the content of a file; None if there is none, or if it is not a regular file inside.

        Raises:
            DeckhandsError: the file is too large, or cannot be read.
        """
        with self._open_folder(path, makes=False) as (folder, name):
            if folder < 0:
                return None
            try:
                descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            except FileNotFoundError:
                return None
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                os.close(descriptor)
                return None
            with os.fdopen(descriptor, "rb") as file:
                if found.st_size > MAX_READ_BYTES:
                    raise DeckhandsError(
                        f"{self.root / path} has more than {MAX_READ_BYTES // 2**20} MiB.", remedy="Make it smaller."
                    )
                return file.read(MAX_READ_BYTES)

    def move(self, path: str, name: str) -> None:
        """Rename a file in its folder, replacing an existing one; no effect if there is no file."""
        with self._open_folder(path, makes=False) as (folder, old):
            if folder >= 0:
                with suppress(FileNotFoundError):
                    os.rename(old, name, src_dir_fd=folder, dst_dir_fd=folder)

    def files(self, path: str) -> list[str]:
        """Return the paths of the regular files below a folder, sorted; links are left out."""
        with self._open_folder(f"{path}/.", makes=False) as (folder, _):
            if folder < 0:
                return []
            found = [
                posixpath.normpath(posixpath.join(path, below, name))
                for below, _folders, names, descriptor in os.fwalk(dir_fd=folder)
                for name in names
                if stat.S_ISREG(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode)
            ]
            return sorted(found)

    @contextmanager
    def lock(self, path: str) -> Iterator[None]:
        """Lock a folder for this process.

        Raises:
            UsageError: another process has locked it.
        """
        with self._open_folder(f"{path}/.") as (folder, _):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"Another run works on {self.root / path}.", remedy="Wait for it, or give this run another name."
                ) from None
            yield

    def _new(self, name: str, folder: int) -> int:
        """Create a file in an open folder, and open it."""
        descriptor = os.open(name, _NEW, 0o644, dir_fd=folder)
        self._give_to_owner(descriptor)
        return descriptor

    def _give_to_owner(self, descriptor: int) -> None:
        """As root, give a created file to the directory's owner, because commands in a container run as that user."""
        owner = self.root.stat()
        if os.geteuid() == 0 and owner.st_uid != 0:
            os.fchown(descriptor, owner.st_uid, owner.st_gid)

    @contextmanager
    def _open_folder(self, path: str, *, makes: bool = True) -> Iterator[tuple[int, str]]:
        """Yield the open folder of a file, and the file's name; -1 if the folder is missing and must not be created."""
        *folders, name = path.split("/")
        descriptor = -1
        try:
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            for folder in folders:
                is_new = False
                if makes:
                    with suppress(FileExistsError):
                        os.mkdir(folder, dir_fd=descriptor)
                        is_new = True
                try:
                    following = os.open(folder, _FOLDER, dir_fd=descriptor)
                    if is_new:
                        self._give_to_owner(following)
                except FileNotFoundError:
                    if makes:
                        raise
                    following = -1
                os.close(descriptor)
                descriptor = following
                if descriptor < 0:
                    break
            yield descriptor, name
        except OSError as error:
            raise _to_error(self.root / path, error) from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def _to_error(path: Path, error: OSError) -> DeckhandsError:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return PathDenied(
            f"{path} cannot be used: a part of it is a link, or no folder.", remedy="Move it away, and run again."
        )
    return DeckhandsError(f"{path} cannot be used: {error.strerror}.", remedy="Correct its permissions, or free space.")
