"""Ended child processes, reported by the loop.

Holds: every child is reaped, also those of others that the kernel gave to this process; who is waited for and stops
goes on, as in a terminal multiplexer, because nobody else could continue a shell that stopped itself.
Does not: work twice in one process; signal handlers belong to the whole of it.
"""

from __future__ import annotations

import os

from tool_worker.host.compiled import signal
from tool_worker.host.loop import Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Children:
    """Reaps children and tells who waits for them."""

    def __init__(self, loop: Loop) -> None:
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._wakeups, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        # The handler has nothing to do: the byte that the interpreter writes to the pipe wakes the loop.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        loop.on_readable(self._wakeups, self._woken)

    @property
    def watched(self) -> frozenset[int]:
        """Who is waited for."""
        return frozenset(self._callbacks)

    def watch(self, pid: int, callback: Callable[[int], None]) -> None:
        """Call back with the exit status of this child, 128 + n if signal n killed it."""
        self._callbacks[pid] = callback

    def reap(self) -> bool:
        """Reap who has ended; return whether children remain."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if os.WIFSTOPPED(status):
                # Not who wants the terminal from the background: it would stop again at once, and again.
                if pid in self._callbacks and os.WSTOPSIG(status) in (signal.SIGSTOP, signal.SIGTSTP):
                    os.kill(pid, signal.SIGCONT)
                continue
            exit_code = os.waitstatus_to_exitcode(status)
            if callback := self._callbacks.pop(pid, None):
                callback(exit_code if exit_code >= 0 else 128 - exit_code)

    def _woken(self) -> None:
        os.read(self._wakeups, 4096)
        self.reap()
