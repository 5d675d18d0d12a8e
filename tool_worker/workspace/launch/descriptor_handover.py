"""How a host that inherits nothing gets its descriptors: it is handed them through a socket, once.

Holds: only what the socket was mounted into can connect, because its folder is closed to others; after one has been
served, nobody listens any more.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tool_worker.sandbox import bind_for_all

HANDOVER_LIMIT_SECONDS = 60.0
LOOK_AGAIN_SECONDS = 0.2


def start_and_hand_over(command: Sequence[str], entrance: Path, sources: Mapping[int, int], log: int) -> int:
    """Run a command that starts a host elsewhere, hand the host its descriptors, and return the command's process id.

    Blocks for as long as that takes, a second or so.

    Args:
        sources: by the number that a descriptor gets in the host.
        log: gets what the command prints.

    Raises:
        OSError: nobody came for them.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        bind_for_all(listener, entrance)  # the host may run as any user; nobody else has access to the folder
        listener.listen(1)
        listener.settimeout(LOOK_AGAIN_SECONDS)
        try:
            pid = os.posix_spawn(
                command[0],
                list(command),
                {},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ],
                setsid=True,
            )
            _give(listener, sources, pid)
        finally:
            entrance.unlink(missing_ok=True)
    return pid


def _give(listener: socket.socket, sources: Mapping[int, int], pid: int) -> None:
    """Serve the first caller; a command that failed means that there will be none."""
    taker = None
    has_ended = False
    for _ in range(int(HANDOVER_LIMIT_SECONDS / LOOK_AGAIN_SECONDS)):
        with suppress(TimeoutError):
            taker, _ = listener.accept()
            break
        if not has_ended:
            ended, status = os.waitpid(pid, os.WNOHANG)
            has_ended = bool(ended)
            if has_ended and status:
                raise ConnectionAbortedError("the container was not started")
    if taker is None:
        raise TimeoutError("nobody came for the descriptors of the host")
    with taker:
        taker.settimeout(HANDOVER_LIMIT_SECONDS)
        socket.send_fds(taker, [bytes(sources)], list(sources.values()))
        if not taker.recv(1):
            raise ConnectionAbortedError("the host did not take its descriptors")
