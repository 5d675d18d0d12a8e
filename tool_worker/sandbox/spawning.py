"""Starts programs that outlive the tool worker, with their initial descriptors.

Holds: a program leads its own session. It has default signal handling, an empty environment, and only the named
descriptors. Other threads run while `spawn` waits for a processor: `os.posix_spawn` holds the interpreter until the new
process has replaced itself, which takes tens of milliseconds on a busy machine. So this calls the C library itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

_DEFAULT_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD, signal.SIGXFSZ]
_FIRST_FREE_FD = 64

_LIBC = ctypes.CDLL(None)
_STRUCT_BYTES = 1024
"""More than the structures of any C library take: 336 bytes is the largest one of glibc."""
_SETSIGDEF, _SETSIGMASK, _SETSID = 0x04, 0x08, 0x80
_FLAGS = _SETSIGDEF | _SETSIGMASK | _SETSID


def spawn(command: Sequence[str], descriptors: Mapping[int, int]) -> int:
    """Start a command and return its process id. Blocks until it runs.

    Args:
        descriptors: our descriptors by their number in the program; the caller closes its own copies.

    Raises:
        OSError: it cannot be started.
        ValueError: a word of the command contains a NUL.
    """
    if any("\0" in word for word in command):
        raise ValueError(f"A word of the command contains a NUL: {command}")
    with ExitStack() as closing:
        moved = {}
        for target, source in descriptors.items():
            # Move the descriptors above the target numbers first, or one could overwrite another's source.
            moved[target] = fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
            closing.callback(os.close, moved[target])
        return _spawn(command, moved)


def _spawn(command: Sequence[str], descriptors: Mapping[int, int]) -> int:
    actions, attributes = (ctypes.create_string_buffer(_STRUCT_BYTES) for _ in range(2))
    no_signals, signals = (ctypes.create_string_buffer(_STRUCT_BYTES) for _ in range(2))
    pid = ctypes.c_int()
    _check(_LIBC.posix_spawn_file_actions_init(actions))
    try:
        _check(_LIBC.posix_spawnattr_init(attributes))
        try:
            for target, source in descriptors.items():
                _check(_LIBC.posix_spawn_file_actions_adddup2(actions, source, target))
            _LIBC.sigemptyset(no_signals)
            _LIBC.sigemptyset(signals)
            for number in _DEFAULT_SIGNALS:
                _LIBC.sigaddset(signals, number)
            _check(_LIBC.posix_spawnattr_setsigmask(attributes, no_signals))
            _check(_LIBC.posix_spawnattr_setsigdefault(attributes, signals))
            _check(_LIBC.posix_spawnattr_setflags(attributes, ctypes.c_short(_FLAGS)))
            words = [os.fsencode(word) for word in command]
            arguments = (ctypes.c_char_p * (len(words) + 1))(*words, None)
            environment = (ctypes.c_char_p * 1)(None)
            error = _LIBC.posix_spawn(ctypes.byref(pid), words[0], actions, attributes, arguments, environment)
            _check(error, command[0])
        finally:
            _LIBC.posix_spawnattr_destroy(attributes)
    finally:
        _LIBC.posix_spawn_file_actions_destroy(actions)
    return pid.value


def _check(error: int, name: str | None = None) -> None:
    if error:
        raise OSError(error, os.strerror(error), name)


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
