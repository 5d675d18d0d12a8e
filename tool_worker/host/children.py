"""Child processes: begun as the first to be killed when memory is short, and reported by the loop when they have ended.

Holds:
    - When memory is short, the kernel kills what we started before it kills us.
    - Every child is reaped, also those of others that the kernel gave to this process; a child that the loop waits
      for and that stops itself is continued, as in a terminal multiplexer, because nobody else could continue it.
Does not: work twice in one process; signal handlers belong to the whole of it.
"""

from __future__ import annotations

import os

from tool_worker.host.compiled import signal
from tool_worker.host.loop import Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


SHARE_OF_CHILDREN = 200
"""Of a thousand: by this share of all memory a child seems to take more than it does."""


class OomScore:
    """How soon the kernel kills this process when memory is short; to be made while it may still write to /proc."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._ours = b"0"
        self._theirs = b"0"
        try:
            self._descriptor = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return  # the kernel refuses: then all are alike
        self._ours = os.read(self._descriptor, 16).strip()
        self._theirs = b"%d" % min(1000, int(self._ours) + SHARE_OF_CHILDREN)

    def raise_for_children(self) -> None:
        """Be one that is killed sooner, and so what is forked now."""
        self._write(self._theirs)

    def restore(self) -> None:
        """Be as this process began."""
        self._write(self._ours)

    def _write(self, score: bytes) -> None:
        if self._descriptor >= 0:
            os.pwrite(self._descriptor, score, 0)


class Children:
    """Begins children, reaps them and reports their ends to the callers that wait."""

    def __init__(self, loop: Loop, score: OomScore) -> None:
        self._score = score
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

    def fork(self) -> int:
        """Fork, as `os.fork` does.

        Raises:
            OSError: the machine, or a limit, has no process left.
        """
        # A child begins as we are, and may not write to /proc to change it.
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
