"""Reading and replacing the bytes of one regular file.

The editor's `view` shows pictures to a vision model.

Holds:
    - Never blocks on a FIFO, a device or a socket, and never reads more than the limit, whatever `stat` reports.
    - A replacement is atomic: readers see the old bytes or the new ones, and an error leaves the old ones.
    - The mode is kept except for the set-id bits, and the owner if the operating system allows it. A symbolic link is
      kept, and its target is replaced.
    - A file that this process may not write is not replaced, even if the directory permissions would allow it.
    - The format of a picture is detected from its content, not from its name; larger pictures are refused with a hint.
Does not:
    - Keep hard links (the other names keep the old bytes), extended attributes or ACLs.
    - fsync: a power failure may lose the last edits, the death of a process does not.
    - Confine paths; the sandbox around the workspace host does.
"""

from __future__ import annotations

import errno
import os
import stat
from binascii import b2a_base64

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
    """Return the status of the file at `path`, following symbolic links.

    Returns:
        The status, or None if there is no file; a broken link counts as no file.

    Raises:
        FileAccessError: the operating system refused (permissions, name too long, circular links).
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
        FileRejectedError: it is larger, or not a regular file.
        FileAccessError: the operating system refused.
    """
    try:
        # The stat before the open avoids opening devices, which can have side effects. The stat after it detects a file
        # that was replaced in between. O_NONBLOCK keeps the open of a FIFO from blocking.
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
    """Replace the content of the file at `path`; create the file if it does not exist.

    Idempotent: yes, for the same content.

    Raises:
        FileRejectedError: `path` is not a regular file.
        FileAccessError: the operating system refused; the file is unchanged.
    """
    target = os.path.realpath(path)
    try:
        old = _status_of_writable(target)
        # Like any write, this clears the set-id bits, because the content may no longer be the owner's.
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
    """Create the parent directories of a path.

    Raises:
        FileAccessError: the operating system refused.
    """
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    except FileExistsError:  # a parent directory is a file
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
    """Return the status of a file, after checking that this process may write it; None if it does not exist."""
    try:
        status = os.stat(target)
    except FileNotFoundError:
        return None
    _require_regular(target, status)
    # `os.replace` would not check this: it only needs write permission on the directory.
    os.close(os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY))
    return status


def _open_temporary(directory: str, mode: int) -> tuple[int, str]:
    """Open a new file next to the target. Its name is short, because the target's name may have the maximum length."""
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
        # Only root may change the owner, and the edit matters more than the owner.
        return


MAX_PICTURE_BYTES = 4 * 2**20
"""Providers accept five million characters, and base64 adds a third; some providers downscale pictures."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".webp")
_BEGINNINGS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}


def is_picture(path: str) -> bool:
    """Return whether a file name has the suffix of a picture."""
    return os.path.splitext(path)[1].lower() in SUFFIXES


def picture_url(path: str) -> str:
    """Return a picture as a `data:` address.

    Raises:
        FileRejectedError: it is too large, not a regular file, or not a picture.
    """
    content = read_regular_file(path, MAX_PICTURE_BYTES)
    kind = next((kind for beginning, kind in _BEGINNINGS.items() if content.startswith(beginning)), None)
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        kind = "image/webp"
    if kind is None:
        raise FileRejectedError(path, "File is named like a picture, but is not a PNG, JPEG, GIF or WebP.")
    return f"data:{kind};base64,{b2a_base64(content, newline=False).decode()}"
