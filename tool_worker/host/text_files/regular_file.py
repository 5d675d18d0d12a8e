"""Reading and replacing the bytes of one regular file.

Holds:
    - Never blocks on a FIFO, a device or a socket, and never reads more than the limit, whatever `stat` claims.
    - A replacement is atomic: readers see the old bytes or the new ones, and an error leaves the old ones.
    - The mode is kept but for set-user-id, and the owner where the operating system lets us. A symbolic link stays one:
      its target changes.
    - A file that this process may not write is not replaced, though the directory would allow it.
Does not:
    - Keep hard links: the other names keep the old bytes. Nor extended attributes or ACLs.
    - fsync: a power failure may lose the last edits, a killed process does not.
    - Confine paths: the sandbox around the workspace host does.
"""

from __future__ import annotations

import errno
import os
import stat

from tool_worker.host.text_files.file_errors import FileAccessError, FileRejectedError

_CHUNK_BYTES = 2**20
_TEMPORARY_NAME_ATTEMPTS = 100
_SET_ID_BITS = stat.S_ISUID | stat.S_ISGID
_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "FIFO",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFSOCK: "socket",
}


def find_status(path: str) -> os.stat_result | None:
    """Look at what is at `path`, through symbolic links.

    Returns:
        The status, or None if nothing is there; a link that leads nowhere counts as nothing.

    Raises:
        FileAccessError: the operating system will not tell (permissions, name too long, links in a circle).
    """
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise FileAccessError(error, f"read {path}") from error


def read_regular_file(path: str, limit_bytes: int) -> bytes:
    """Read a whole file of at most `limit_bytes`.

    Raises:
        FileRejectedError: it is larger, or no regular file.
        FileAccessError: the operating system refused.
    """
    try:
        # A stat before the open, since opening some devices has side effects; a stat after it, since the name may have
        # been given to another file in between. O_NONBLOCK lets the open of a FIFO return.
        _require_regular(path, os.stat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            status = os.fstat(descriptor)
            _require_regular(path, status)
            content = b"" if status.st_size > limit_bytes else _read_up_to(descriptor, limit_bytes + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FileAccessError(error, f"read {path}") from error
    require_size(path, max(status.st_size, len(content)), limit_bytes)
    return content


def require_size(path: str, size_bytes: int, limit_bytes: int) -> None:
    """Refuse a file that is larger than the limit.

    Raises:
        FileRejectedError: `size_bytes` is above `limit_bytes`.
    """
    if size_bytes > limit_bytes:
        raise FileRejectedError(
            path,
            f"File is too large ({size_bytes / 2**20:.1f}MB). Maximum allowed size is {int(limit_bytes / 2**20)}MB. "
            "Use bash to work on parts of it, e.g. with `grep -n` and `sed -n`.",
        )


def replace_file(path: str, content: bytes) -> None:
    """Make `content` the content of the file at `path`, which is created if nothing is there.

    Idempotent: yes, for the same content.

    Raises:
        FileRejectedError: something else than a regular file is there.
        FileAccessError: the operating system refused; the file is as it was.
    """
    target = os.path.realpath(path)
    try:
        old = _status_of_writable(target)
        # As any write does, this clears a set-user-id mode: the content is no longer its owner's.
        mode = stat.S_IMODE(old.st_mode) & ~_SET_ID_BITS if old else 0o666
        descriptor, temporary = _open_temporary(os.path.dirname(target), mode)
        try:
            with open(descriptor, "wb") as stream:
                stream.write(content)
                stream.flush()
                if old:
                    _keep_owner(descriptor, old)
                    os.fchmod(descriptor, mode)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise FileAccessError(error, f"write to {path}") from error


def make_parents(path: str) -> None:
    """Make the directories above a path.

    Raises:
        FileAccessError: the operating system refused.
    """
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    except FileExistsError:  # a file is where the last directory should be
        error = NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        raise FileAccessError(error, f"make the directory of {path}") from None
    except OSError as error:
        raise FileAccessError(error, f"make the directory of {path}") from error


def _require_regular(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "special file")
        raise FileRejectedError(path, f"It is a {kind}, and only regular files can be read or edited by this tool.")


def _read_up_to(descriptor: int, limit_bytes: int) -> bytes:
    chunks = []
    missing = limit_bytes
    while missing > 0:
        chunk = os.read(descriptor, min(missing, _CHUNK_BYTES))
        if not chunk:
            break
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)


def _status_of_writable(target: str) -> os.stat_result | None:
    """Status of an existing file, after asking the kernel whether this process may write it."""
    try:
        status = os.stat(target)
    except FileNotFoundError:
        return None
    _require_regular(target, status)
    # os.replace would not ask: it needs rights on the directory only.
    os.close(os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY))
    return status


def _open_temporary(directory: str, mode: int) -> tuple[int, str]:
    """Open a new file beside the target, with a short name, since the target's own may already have the full length."""
    for attempt in range(_TEMPORARY_NAME_ATTEMPTS):
        temporary = os.path.join(directory, f".deckhands-edit-{os.getpid()}-{attempt}")
        try:
            return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), temporary
        except FileExistsError:
            continue
    raise FileExistsError(f"{_TEMPORARY_NAME_ATTEMPTS} files named .deckhands-edit-* are left over in {directory}")


def _keep_owner(descriptor: int, old: os.stat_result) -> None:
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) == (old.st_uid, old.st_gid):
        return
    try:
        os.fchown(descriptor, old.st_uid, old.st_gid)
    except PermissionError:
        # Only root may give files away, and the edit is worth more than the owner's name.
        return
