"""Child processes: they are killed first when memory is short, and the loop reports their exits.

Holds:
    - When memory is short, the kernel kills the children before the host.
    - Every child is reaped, including orphans that the kernel reparented to this process. A watched child that stops
      itself is continued, as in a terminal multiplexer, because no other process could continue it.
Does not: support two instances in one process, because signal handlers belong to the whole process.
"""

from __future__ import annotations

import os

from tool_worker.host.compiled import signal
from tool_worker.host.loop import EventLoop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


SHARE_OF_CHILDREN = 200
"""Added to a child's OOM score, in thousandths of all memory."""


class OomScore:
    """The OOM score of this process. Create it while the process may still write to /proc."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._ours = b"0"
        self._theirs = b"0"
        try:
            self._descriptor = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return  # if the kernel refuses, all processes have the same score
        self._ours = os.read(self._descriptor, 16).strip()
        self._theirs = b"%d" % min(1000, int(self._ours) + SHARE_OF_CHILDREN)

    def raise_for_children(self) -> None:
        """Raise the score, so that a process forked now is killed earlier than this one."""
        self._write(self._theirs)

    def restore(self) -> None:
        """Restore the score that this process started with."""
        self._write(self._ours)

    def _write(self, score: bytes) -> None:
        if self._descriptor >= 0:
            os.pwrite(self._descriptor, score, 0)


class Children:
    """Starts children, reaps them and passes their exit statuses to callbacks."""

    def __init__(self, loop: EventLoop, score: OomScore) -> None:
        self._score = score
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._wakeups, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        # The handler does nothing: the byte that the interpreter writes to the pipe wakes the loop.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        loop.on_readable(self._wakeups, self._on_wakeup)

    @property
    def watched(self) -> frozenset[int]:
        """The pids of all watched children."""
        return frozenset(self._callbacks)

    def fork(self) -> int:
        """Fork, as `os.fork` does.

        Raises:
            OSError: the machine or a limit allows no further process.
        """
        # A child inherits the score, and may not write to /proc to change it.
        self._score.raise_for_children()
        try:
            pid = os.fork()
        except OSError:
            self._score.restore()
            raise
        if pid:
            self._score.restore()
        return pid

    def watch(self, pid: int, callback: Callable[[int], None]) -> None:
        """Call `callback` with the exit status of this child; 128 + n if signal n killed it."""
        self._callbacks[pid] = callback

    def reap(self) -> bool:
        """Reap all children that have exited; return whether children remain."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if os.WIFSTOPPED(status):
                # A background process that stopped to read or write the terminal is not continued: it would stop again
                # at once.
                if pid in self._callbacks and os.WSTOPSIG(status) in (signal.SIGSTOP, signal.SIGTSTP):
                    os.kill(pid, signal.SIGCONT)
                continue
            exit_code = os.waitstatus_to_exitcode(status)
            if callback := self._callbacks.pop(pid, None):
                callback(exit_code if exit_code >= 0 else 128 - exit_code)

    def _on_wakeup(self) -> None:
        os.read(self._wakeups, 4096)
        self.reap()
