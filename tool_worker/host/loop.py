"""The host's event loop: file descriptors and timers on one thread, without asyncio.

Holds: callbacks run one at a time, in the order in which the kernel reports events. An exception in a callback ends the
loop, because a host that has lost an event must not continue.
Does not: start threads, or read the clock while no timer is set.
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
    """A deadline that can be moved cheaply: the loop keeps one entry per timer, even if it is set often."""

    __slots__ = ("callback", "due")

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.due: float | None = None

    def set(self, due: float | None) -> None:
        """Fire at this time of the loop's clock; None: never."""
        self.due = due


class EventLoop:
    """Runs callbacks when descriptors are ready or timers are due.

    Args:
        clock: Returns seconds; must be monotonic.
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
        """Call `callback` whenever `fd` is readable or at its end; None removes the callback."""
        self._watch(fd, select.EPOLLIN, callback)

    def on_writable(self, fd: int, callback: Callable[[], None] | None) -> None:
        """Call `callback` whenever `fd` is writable; None removes the callback."""
        self._watch(fd, select.EPOLLOUT, callback)

    def timer(self, callback: Callable[[], None]) -> Timer:
        """Return a new timer that is not set; the loop keeps it until `drop`."""
        timer = Timer(callback)
        self._timers.append(timer)
        return timer

    def drop(self, timer: Timer) -> None:
        """Remove a timer."""
        timer.due = None
        self._timers.remove(timer)

    def run(self) -> None:
        """Run callbacks until `stop`."""
        while not self._is_stopped:
            due = min((timer.due for timer in self._timers if timer.due is not None), default=None)
            timeout = None if due is None else max(0.0, due - self._clock())
            for fd, events in self._poll.poll(timeout):
                for event in (select.EPOLLIN, select.EPOLLOUT):
                    if self._is_stopped:
                        return
                    # EOF and errors are reported to both callbacks. An earlier callback of this round may have removed
                    # this one.
                    is_news = events & (event | ~_BOTH)
                    callback = self._callbacks.get(fd, {}).get(event) if is_news else None
                    if callback is not None:
                        callback()
            for timer in list(self._timers):
                if timer.due is not None and timer.due <= self._clock():
                    timer.due = None
                    timer.callback()

    def stop(self) -> None:
        """Make `run` return after the current callback; other ready descriptors are skipped."""
        self._is_stopped = True

    def _watch(self, fd: int, event: int, callback: Callable[[], None] | None) -> None:
        callbacks = self._callbacks.setdefault(fd, {})
        before = sum(callbacks)  # the keys are event bits
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
    """Writes to a non-blocking descriptor and buffers the rest.

    Does not: report a closed reader; reading from the same peer detects that.
    """

    def __init__(self, loop: EventLoop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        self._waiting = bytearray()

    @property
    def waiting_bytes(self) -> int:
        """The number of buffered bytes."""
        return len(self._waiting)

    def write(self, chunk: bytes) -> None:
        """Write as much as the descriptor takes now, and the rest later, in order."""
        self._waiting += chunk
        self._flush()

    def clear(self) -> None:
        """Drop the buffer; call this before the descriptor is closed."""
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
