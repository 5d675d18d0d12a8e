"""Receives a host's descriptors where they cannot be inherited, then becomes the host.

    python3 -I -S descriptor_receiver.py ENTRANCE MAIN [ARGUMENT…]

It receives the descriptors from the socket at ENTRANCE, moves each one to its number, applies the system call filter
that is among them, and executes the host with an empty environment.

Does not: import our own modules; it runs as a file, before the import path is set up.
"""

from __future__ import annotations

import _socket as socket
import ctypes
import fcntl
import os
import struct
import sys

_FIRST_FREE_FD = 64
_MAX_DESCRIPTORS = 16
_FILTER_FD = 8
"""As in `configuration`."""
_FILTER_LIMIT_BYTES = 1 << 16
_INSTRUCTION_BYTES = 8
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2


class _FilterProgram(ctypes.Structure):
    _fields_ = (("instructions", ctypes.c_ushort), ("beginning", ctypes.c_char_p))


def main() -> None:
    """Receive the descriptors and become the host."""
    entrance, *host = sys.argv[1:]
    giver = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    giver.connect(entrance)
    numbers, rights, _, _ = giver.recvmsg(_MAX_DESCRIPTORS, socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4))
    received = struct.unpack(f"{len(numbers)}i", rights[0][2])
    # Move them above all target numbers first; otherwise one `dup2` could overwrite the source of another.
    given = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FIRST_FREE_FD) for descriptor in received]
    giver.send(b".")
    giver.close()
    for descriptor, target in zip(given, numbers, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    apply_filter(os.read(_FILTER_FD, _FILTER_LIMIT_BYTES))
    os.execve(sys.executable, [sys.executable, "-I", "-S", *host], {})  # noqa: S606  (the host's own module)


def apply_filter(program: bytes) -> None:
    """Apply a system call filter to this process and all that it starts; an empty filter allows every call.

    Raises:
        OSError: the kernel rejects the filter.
    """
    if not program:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    filtered = _FilterProgram(len(program) // _INSTRUCTION_BYTES, program)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filtered), 0, 0),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "the kernel rejects the system call filter")


if __name__ == "__main__":
    main()
