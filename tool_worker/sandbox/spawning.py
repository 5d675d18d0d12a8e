"""Starts programs that outlive the tool worker, with their initial descriptors.

Holds: a program leads its own session. It has default signal handling, an empty environment, and only the named
descriptors.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

_DEFAULT_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD, signal.SIGXFSZ]
_FIRST_FREE_FD = 64


def spawn(command: Sequence[str], descriptors: Mapping[int, int]) -> int:
    """Start a command and return its process id.

    Args:
        descriptors: our descriptors by their number in the program; the caller closes its own copies.

    Raises:
        OSError: it cannot be started.
    """
    with ExitStack() as closing:
        moved = {}
        for target, source in descriptors.items():
            # Move the descriptors above the target numbers first, or one could overwrite another's source.
            moved[target] = fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
            closing.callback(os.close, moved[target])
        return os.posix_spawn(
            command[0],
            list(command),
            {},
            file_actions=[(os.POSIX_SPAWN_DUP2, source, target) for target, source in moved.items()],
            setsid=True,
            setsigmask=[],
            setsigdef=_DEFAULT_SIGNALS,
        )


def open_private(closing: ExitStack, path: Path, flags: int) -> int:
    """Open a file that no other user can access. Return its descriptor."""
    descriptor = os.open(path, flags, 0o600)
    closing.callback(os.close, descriptor)
    return descriptor


def open_in_memory(closing: ExitStack, content: bytes) -> int:
    """Return a descriptor from which these bytes can be read."""
    descriptor = os.memfd_create("deckhands")
    closing.callback(os.close, descriptor)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def bind_for_all(listener: socket.socket, address: Path) -> None:
    """Bind a socket through a short path, because the kernel allows only 108 bytes.

    Every user with access to the folder may connect.
    """
    address.unlink(missing_ok=True)
    folder = os.open(address.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{address.name}")
    finally:
        os.close(folder)
    address.chmod(0o666)
