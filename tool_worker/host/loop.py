"""The host's event loop: file descriptors and alarms on one thread, without asyncio.

Holds: callbacks run one at a time, in the order in which the kernel reports them; a callback that raises ends the
loop, because a host that has lost an event must not continue.
Does not: start threads, or read a clock while nothing is due.
"""

from __future__ import annotations

import os
import select
from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_BOTH = select.EPOLLIN | select.EPOLLOUT


class Timer:
    """A deadline that can be moved as often as one likes: the loop keeps one entry however often it is set."""

    __slots__ = ("callback", "due")

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.due: float | None = None

    def set(self, due: float | None) -> None:
        """Ring at this time of the loop's clock; None: never."""
        self.due = due


class Loop:
    """Calls back when a descriptor is ready or a timer is due.

    Args:
        clock: Returns seconds that never go backwards.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._poll = select.epoll()
        self._callbacks: dict[int, dict[int, Callable[[], None]]] = {}
        self._timers: list[Timer] = []
        self._is_stopped = False

    def now(self) -> float:
        """Return the loop's clock in seconds (monotonic)."""
        return self._clock()

    def on_readable(self, fd: int, callback: Callable[[], None] | None) -> None:
        """Call back whenever `fd` has something to read or has ended; None stops that."""
        self._watch(fd, select.EPOLLIN, callback)

    def on_writable(self, fd: int, callback: Callable[[], None] | None) -> None:
        """Call back whenever `fd` takes more; None stops that."""
        self._watch(fd, select.EPOLLOUT, callback)

    def timer(self, callback: Callable[[], None]) -> Timer:
        """Return a new timer, not yet set; it stays with the loop until `drop`."""
        timer = Timer(callback)
        self._timers.append(timer)
        return timer

    def drop(self, timer: Timer) -> None:
        """Forget a timer."""
        timer.due = None
        self._timers.remove(timer)

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._is_stopped:
            due = min((timer.due for timer in self._timers if timer.due is not None), default=None)
            timeout = None if due is None else max(0.0, due - self._clock())
            for fd, events in self._poll.poll(timeout):
                for event in (select.EPOLLIN, select.EPOLLOUT):
                    if self._is_stopped:
                        return
                    # An end or an error is news for both; an earlier callback of this round may have given it up.
                    is_news = events & (event | ~_BOTH)
                    callback = self._callbacks.get(fd, {}).get(event) if is_news else None
                    if callback is not None:
                        callback()
            self._fire_due()

    def stop(self) -> None:
        """Let `run` return after the callback that calls this; what is ready by then is not served."""
        self._is_stopped = True

    def _fire_due(self) -> None:
        for timer in list(self._timers):
            if timer.due is not None and timer.due <= self._clock():
                timer.due = None
                timer.callback()

    def _watch(self, fd: int, event: int, callback: Callable[[], None] | None) -> None:
        callbacks = self._callbacks.setdefault(fd, {})
        before = sum(callbacks)  # the keys are bits
        if callback is not None:
            callbacks[event] = callback
        else:
            callbacks.pop(event, None)
        events = sum(callbacks)
        if not callbacks:
            del self._callbacks[fd]
        if not before and events:
            self._poll.register(fd, events)
        elif before and not events:
            self._poll.unregister(fd)
        elif events != before:
            self._poll.modify(fd, events)


class BufferedWriter:
    """Writes to a non-blocking descriptor and keeps what it does not take yet.

    Does not: report a reader that is gone; who reads from the same peer sees that.
    """

    def __init__(self, loop: Loop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        self._waiting = bytearray()

    @property
    def waiting_bytes(self) -> int:
        """How much has not been taken yet."""
        return len(self._waiting)

    def write(self, chunk: bytes) -> None:
        """Write now what is taken now, and the rest later, in order."""
        self._waiting += chunk
        self._flush()

    def clear(self) -> None:
        """Forget what has not been taken; to be called before the descriptor is closed."""
        self._waiting.clear()
        self._loop.on_writable(self._fd, None)

    def _flush(self) -> None:
        while self._waiting:
            try:
                taken = os.write(self._fd, self._waiting[:65536])
            except BlockingIOError:
                self._loop.on_writable(self._fd, self._flush)
                return
            except OSError:
                self._waiting.clear()
                break
            del self._waiting[:taken]
        self._loop.on_writable(self._fd, None)
