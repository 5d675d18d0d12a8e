"""Runs work in a child process that is killed after a time limit, so that it cannot block the caller.

Holds: the caller waits no longer than the limit; the output up to then is kept, in bounded memory.
Does not: pass on exceptions; failed work reports its error as text.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

MAX_TEXT_BYTES = 256 * 1024


def run_limited(limit_seconds: float, work: Callable[[Callable[[str], None]], None]) -> tuple[str, bool]:
    """Run work in a child process.

    Args:
        work: Receives a function that writes a piece of the text.

    Returns:
        The written text, and whether the work finished.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()  # so that programs started by the work are killed with it
        _run_child(work, writing)
    os.close(writing)
    written = bytearray()
    deadline = monotonic() + limit_seconds
    is_ended = False
    while len(written) < MAX_TEXT_BYTES and (left := deadline - monotonic()) > 0:
        if not select.select([reading], [], [], left)[0]:
            break
        piece = os.read(reading, 65536)
        if not piece:
            is_ended = True
            break
        written += piece
    os.close(reading)
    for kill in (os.killpg, os.kill):  # the group first; the child may not have created it yet
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return written.decode("utf-8", "replace"), is_ended


def run_program(command: list[str], limit_seconds: float) -> subprocess.CompletedProcess[bytes] | None:
    """Run a program in the workspace's environment, without input; None if it cannot start or takes too long."""
    try:
        return subprocess.run(  # noqa: S603  (the callers' programs, with the path of a file as one word)
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_seconds,
            check=False,
            env=None,  # inherited: this program runs in the workspace's environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _run_child(work: Callable[[Callable[[str], None]], None], writing: int) -> None:
    """Run the work in the child; never returns."""
    try:
        with os.fdopen(writing, "wb") as stream:

            def write(text: str) -> None:
                stream.write(text.encode("utf-8", "replace"))
                stream.flush()

            try:
                work(write)
            except Exception as error:  # noqa: BLE001  (the edge of the child: nobody else could say it)
                write(f"\n[The work failed: {type(error).__name__}: {error}]")
    finally:
        os._exit(0)
