"""Passes descriptors through a socket, once, to a host that cannot inherit them.

Holds: only a process that sees the socket's mount can connect, because its folder is closed to others. After one
client, the socket is closed.
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
    """Run a command that starts a host elsewhere, pass the host its descriptors, and return the command's pid.

    Blocks for a second or so.

    Args:
        sources: Our descriptors, by their number in the host.
        log: Receives the command's output.

    Raises:
        OSError: The host did not connect.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        bind_for_all(listener, entrance)  # the host may run as any user; the folder is closed to all others
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
    """Serve the first client; give up if the command fails."""
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
