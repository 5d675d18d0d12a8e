"""A child process that ends with its parent.

`harden_process` protects a worker from other programs of the same user. Without a sandbox, agents' commands run under
the worker's own user id; with one, they would after an escape. The kernel then still checks access to a process.

Holds: the kernel sends the child a signal when its parent dies, however it died (see `parent_death`). The child leads
its own session, so Ctrl-C at a terminal reaches only the parent, which decides about its children. After
`harden_process`, a program without CAP_SYS_PTRACE can neither read the environment (which has the store's password),
the memory or the open files of this process, nor trace it. It leaves no core dump.
Does not: reach the child's own children. Linux only (PR_SET_PDEATHSIG, pidfd). It does not prevent such a program from
killing this process; protect a worker that runs as root; protect child processes, which are accessible again after
exec; protect the program that started the worker.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

LOG_LIMIT_BYTES = 10 * 1024 * 1024

_PARENT_DEATH = (sys.executable, "-I", "-S", str(Path(__file__).with_name("parent_death.py")))

EXIT_USAGE = 2
"""A worker's settings are invalid; a restart would not help."""
EXIT_STORE_REPLACED = 78
"""A worker's store was emptied or replaced. The worker must not be restarted automatically."""


EXIT_FUNCTIONS = 79
"""The functions in a worker's store do not serve its version. Only another version helps."""


class ChildProcess:
    """A running or ended child process."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen

    @classmethod
    def start(
        cls,
        command: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] = MappingProxyType({}),
        written_to_it: bytes = b"",
        last_signal: signal.Signals = signal.SIGKILL,
        inherited: Sequence[int] = (),
        directory: Path | None = None,
    ) -> ChildProcess:
        """Start a child. Call this from a thread that outlives the child (the main thread).

        Args:
            command: program and arguments.
            log: the file that its output is appended to.
            env: its whole environment; it inherits nothing of ours.
            written_to_it: its standard input, at most a pipe's capacity (64 KiB).
            last_signal: the signal that it gets when its parent dies.
            inherited: file descriptors that it gets in addition to the standard three.
            directory: its working directory; None for ours.

        Raises:
            OSError: no process can be started, or the log cannot be written. If the program does not exist, the child
                ends with status 1.
        """
        with log.open("ab") as output:
            popen = subprocess.Popen(  # noqa: S603  (the caller's own command)
                [*_PARENT_DEATH, str(os.getpid()), str(int(last_signal)), *(str(part) for part in command)],
                stdin=subprocess.PIPE if written_to_it else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=directory,
                start_new_session=True,
                pass_fds=inherited,
            )
        if popen.stdin is not None:
            with popen.stdin:
                popen.stdin.write(written_to_it)
        return cls(popen)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    @property
    def exit_status(self) -> int | None:
        """The exit status of the process, negative for a signal; None while it runs."""
        return self._popen.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        self._popen.send_signal(number)

    async def wait(self) -> int:
        """Wait until it ends and return its exit status."""
        if (status := self._popen.poll()) is not None:
            return status
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        watch = os.pidfd_open(self.pid)
        loop.add_reader(watch, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(watch)
            os.close(watch)
        return self._popen.wait()

    async def stop(self, *, grace_seconds: float) -> int:
        """Send SIGTERM, after `grace_seconds` SIGKILL, and return the exit status. Idempotent."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                return await self.wait()
        except TimeoutError:
            self.send(signal.SIGKILL)
            return await self.wait()


def rotate_log(log: Path) -> None:
    """Rename a log of more than 10 MiB. It replaces the previously renamed one."""
    if log.exists() and log.stat().st_size > LOG_LIMIT_BYTES:
        log.replace(log.with_name(log.name + ".1"))


def read_last_lines(log: Path, *, after: int = 0, limit: int = 20) -> str:
    """Return up to `limit` lines from the end of a log, none from before the offset `after`."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(after, end - 16 * 1024))
        return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-limit:])


_PR_SET_DUMPABLE = 4


def harden_process() -> None:
    """Make this process inaccessible to other programs. Idempotent.

    Raises:
        OSError: the kernel refuses.
    """
    import ctypes  # only workers need it

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl PR_SET_DUMPABLE")
