"""Opens files by untrusted names: only below a directory, and only as the expected kind of file.

Holds: no name leads out of the directory, neither by `..` nor by a link created between a check and an open: the kernel
resolves the path and refuses in one step (`openat2`, RESOLVE_BENEATH). A device, a FIFO or a socket is detected before
it is opened, so that opening it neither blocks nor has an effect. Reads are bounded.
Does not: protect against hard links.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from contextlib import ExitStack

MAX_ATTEMPTS = 100
"""How often an open is repeated that the kernel could not finish because names changed meanwhile."""

_OPENAT2 = 437
_NO_MAGIC_LINKS, _NO_SYMLINKS, _BENEATH = 0x02, 0x04, 0x08


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)


def open_beneath(directory: int, path: str, flags: int, mode: int = 0, *, follows_links: bool = True) -> int:
    """Open a relative path below an open directory and return the file descriptor.

    Args:
        follows_links: whether to follow symbolic links that stay below the directory.

    Raises:
        OSError: `EXDEV` if the path leads out, `ELOOP` if a link may not be followed, or as for `open`.
        ValueError: the path has a surrogate that no file system accepts.
    """
    how = _How(flags | os.O_CLOEXEC, mode, _BENEATH | _NO_MAGIC_LINKS | (0 if follows_links else _NO_SYMLINKS))
    name = os.fsencode(path)
    if b"\0" in name:
        raise OSError(errno.EINVAL, "the path has a NUL in it", path)
    number = 0
    for _ in range(MAX_ATTEMPTS):
        descriptor = _libc.syscall(_OPENAT2, directory, name, ctypes.byref(how), ctypes.sizeof(how))
        if descriptor >= 0:
            return int(descriptor)
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    why = "the path leads out of the directory" if number == errno.EXDEV else os.strerror(number)
    raise OSError(number, why, path)


def read_regular_file(path: str, *, limit_bytes: int, beneath: str | None = None) -> bytes:
    """Return the content of a regular file.

    Args:
        beneath: the directory that the path is relative to and must not leave; None to use the path as it is.

    Raises:
        OSError: it cannot be opened, leads out, is not a regular file, or is larger than the bound.
        ValueError: the path has a surrogate that no file system accepts.
    """
    with ExitStack() as opened:
        if beneath is None:
            known = os.open(path, os.O_PATH | os.O_CLOEXEC)
        else:
            directory = os.open(beneath, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, directory)
            known = open_beneath(directory, path, os.O_PATH)
        opened.callback(os.close, known)
        if not stat.S_ISREG(os.fstat(known).st_mode):
            raise OSError(errno.EINVAL, "It is not a regular file", path)
        # By its descriptor: the name may lead elsewhere by now, but this is the file that was checked.
        descriptor = os.open(f"/proc/self/fd/{known}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123  (a descriptor)
            content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"It is larger than {limit_bytes:,} bytes", path)
    return content
