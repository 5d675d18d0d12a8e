"""How a tool worker starts programs that outlive it, and gives them what they begin with.

Holds: a program leads its own session, with the signals as they are for any program, an empty environment, and no
descriptors but those that are named.
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
        descriptors: by the number that each gets in the program; the caller closes its own.

    Raises:
        OSError: it cannot be started.
    """
    with ExitStack() as closing:
        moved = {}
        for target, source in descriptors.items():
            # Out of the way of the targets first, or one would overwrite another's source.
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


def opened(closing: ExitStack, path: Path, flags: int) -> int:
    """Open a file, for nobody else, and return its descriptor."""
    descriptor = os.open(path, flags, 0o600)
    closing.callback(os.close, descriptor)
    return descriptor


def in_memory(closing: ExitStack, content: bytes) -> int:
    """Return a descriptor from which these bytes can be read."""
    descriptor = os.memfd_create("deckhands")
    closing.callback(os.close, descriptor)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def bind_for_all(listener: socket.socket, address: Path) -> None:
    """Bind a socket by a short path: the kernel takes 108 bytes, and folders may lie deeper.

    Everybody with access to the folder may connect.
    """
    address.unlink(missing_ok=True)
    folder = os.open(address.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{address.name}")
    finally:
        os.close(folder)
    address.chmod(0o666)
