"""An event loop on virtual time whose tasks belong to processes that can die or be stopped at any await.

Holds: nothing here depends on a real clock, a thread or a socket, so the same seed gives the same run; within a process
callbacks run in the order asyncio promises, between processes in an order drawn by the seed; a killed process never
returns from its await (no `finally` of it runs while the simulation lasts), and its tasks and timers are dropped.
Does not: watch file descriptors, sockets, signals or child processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import math
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from enum import IntEnum
from random import Random
from types import CodeType
from typing import Any, Protocol, TypeVar

from broker.testing.manual_clock import ManualClock

T = TypeVar("T")

Timer = tuple[float, int, "asyncio.TimerHandle | asyncio.Future[None]", "SimulatedProcess", "Pause"]
"""When it is due, its number, its handle (of a travel the future), its process, and what it ends."""

MAX_CALLBACKS = 2_000_000
TASKS_KEPT = 1_000
"""After how many new tasks those that have ended are forgotten."""
LEAST_LEAP_SECONDS = 0.5
FRAMES_OF_A_SLEEP = 3
"""From `call_at` to the coroutine that sleeps: `call_later`, and `asyncio.sleep`."""

_process: contextvars.ContextVar[SimulatedProcess] = contextvars.ContextVar("process")


class RanDry(AssertionError):
    """Nothing is left to run, and the awaited event has not happened."""


class Pause(IntEnum):
    """What a timer ends."""

    WORK = 0
    """Something that happens: no span behind it is left out."""
    TRAVEL = 1
    """The travel of a message: no span behind it is left out, but its arrival alone is nothing that happens."""
    LOOK = 2
    """A pause between two looks; if it ends in a span that is left out, the look comes at the end of that."""
    BEAT = 3
    """A pause between two beats, or a blocked read; it lasts longer by a span that is left out."""


class Leaps(Protocol):
    """Decides which spans of time are left out."""

    def find_longest(self, now: float) -> float:
        """Return how long a span from now on may be left out; 0: none."""
        ...

    def classify(self, callback: Callable[..., Any], process: SimulatedProcess, delay: float, by: CodeType) -> Pause:
        """Return what a new timer ends.

        Args:
            by: the code of the coroutine that sleeps, if it is a sleep.
        """
        ...

    def note_change(self, now: float) -> None:
        """Note that something has happened that is not repeated."""
        ...

    def note_leap(self, now: float, seconds: float) -> None:
        """Note that a span was left out."""
        ...


class SimulatedProcess:
    """A process of the simulation: everything that was started in its context."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_stopped = False
        self.ready: deque[asyncio.Handle] = deque()
        self.context = contextvars.copy_context()
        self.context.run(_process.set, self)

    def kill(self) -> None:
        """End it as SIGKILL does: its awaited events never come."""
        self.is_dead = True
        self.ready.clear()

    def stop(self) -> None:
        """Stop it as SIGSTOP does; events that become due meanwhile wait for `resume`."""
        self.is_stopped = True

    def resume(self) -> None:
        """Continue after `stop`."""
        self.is_stopped = False


class VirtualFuture(asyncio.Future[Any]):
    """A future that a set orders by when it was made, and not by its address."""

    number: int
    """Set by `VirtualLoop.create_future`; without `__init__`, futures are made twice as fast."""

    def __hash__(self) -> int:
        return self.number


class VirtualTask(asyncio.Task[Any]):
    """A task that a set orders by when it was made, and not by its address: task groups cancel theirs in that order."""

    def __init__(self, coro: Coroutine[Any, Any, Any], *, loop: VirtualLoop, **options: Any) -> None:
        self.number = loop.next_number()
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.AbstractEventLoop):
    """The loop all processes of one simulation share."""

    def __init__(self, clock: ManualClock, random: Random) -> None:
        self.world = SimulatedProcess("world")
        """What is not a process of the cluster: the operating system, the network, the store, the test itself."""
        self.callbacks = 0
        self._clock = clock
        self._random = random
        self._awake: list[SimulatedProcess] = []
        self._work: list[Timer] = []
        """Heap of the timers that end `WORK` or `TRAVEL`."""
        self._looks: list[Timer] = []
        """Heap of the timers that end `LOOK` or `BEAT`."""
        self.leaps: Leaps | None = None
        self._number = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self._looked_at = TASKS_KEPT
        self._is_closed = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the world until it has ended, then throw everything else away."""
        task = self.world.context.run(VirtualTask, work, loop=self)
        self._tasks.append(task)
        asyncio._set_running_loop(self)
        hooks = sys.get_asyncgen_hooks()
        # A generator that was not read to its end is thrown away like a dead process: none of its `finally` runs.
        sys.set_asyncgen_hooks(finalizer=lambda _: None)
        try:
            while not task.done():
                self._run_next()
            return task.result()
        finally:
            sys.set_asyncgen_hooks(*hooks)
            self._throw_away()
            asyncio._set_running_loop(None)
            self._is_closed = True

    def next_number(self) -> int:
        """Number what is made, in order."""
        self._number += 1
        return self._number

    def _run_next(self) -> None:
        if not self._awake:
            self._pass_time()
            return
        if len(self._awake) == 1 and (process := self._awake[0]).ready and not process.is_stopped:
            pass  # the usual case
        else:
            able = [process for process in self._awake if process.ready and not process.is_stopped]
            self._awake = [process for process in self._awake if process.ready]
            if not able:
                self._pass_time()
                return
            process = able[0] if len(able) == 1 else self._random.choice(able)
        handle = process.ready.popleft()
        self.callbacks += 1
        assert self.callbacks < MAX_CALLBACKS, "the simulation does not come to an end"
        if not handle._cancelled:
            handle._run()

    def _pass_time(self) -> None:
        """Advance to the next moment at which a timer is due."""
        if self.leaps is not None:
            self._leap(self.leaps)
        work, looks = self._work, self._looks
        while work or looks:
            is_work = not looks or (work and work[0] < looks[0])
            when, _, handle, process, pause = heapq.heappop(work if is_work else looks)
            if process.is_dead or handle.cancelled():
                continue
            if pause is Pause.WORK and self.leaps is not None:
                self.leaps.note_change(when)
            self._clock.advance(max(0.0, when - self._clock.monotonic()))
            if isinstance(handle, asyncio.Handle):
                self._wake(process, handle)
            else:
                handle.set_result(None)
            return
        raise RanDry("nothing is left to run")

    def _leap(self, leaps: Leaps) -> None:
        """Leave out a span in which all would only repeat what they have just done."""
        now, work = self.time(), self._work
        while work and (work[0][3].is_dead or work[0][2].cancelled()):
            heapq.heappop(work)
        longest = work[0][0] - now if work else math.inf
        if longest < LEAST_LEAP_SECONDS:
            return
        seconds = math.floor(min(longest, leaps.find_longest(now)) * 1_000) / 1_000
        if seconds < LEAST_LEAP_SECONDS:
            return
        looks, self._looks = self._looks, []
        for when, number, handle, process, pause in looks:
            if not (process.is_dead or handle.cancelled()):
                then = when + seconds if pause is Pause.BEAT else max(when, now + seconds)
                handle._when = then  # type: ignore[union-attr]
                self._looks.append((then, number, handle, process, pause))
        heapq.heapify(self._looks)
        self._clock.advance(seconds)
        leaps.note_leap(now, seconds)

    def _wake(self, process: SimulatedProcess, handle: asyncio.Handle) -> None:
        if process.is_dead:
            return
        if not process.ready and process not in self._awake:
            self._awake.append(process)
        process.ready.append(handle)

    def _throw_away(self) -> None:
        """Close what still waits. Only now may its `finally` blocks run; nothing they ask for is done any more."""
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False
                with contextlib.suppress(RuntimeError, BaseExceptionGroup):  # a group of tasks that is left
                    task.get_coro().close()
        self._tasks.clear()

    # asyncio's interface of a loop

    def time(self) -> float:
        return self._clock.monotonic()

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        context = context if context is not None else contextvars.copy_context()
        handle = asyncio.Handle(callback, args, self, context)
        self._wake(context.get(_process, self.world), handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        context = context if context is not None else contextvars.copy_context()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        process, pause = context.get(_process, self.world), Pause.WORK
        if self.leaps is not None:
            delay, by = when - self._clock.monotonic(), sys._getframe(FRAMES_OF_A_SLEEP).f_code
            pause = self.leaps.classify(callback, process, delay, by)
        timers = self._work if pause is Pause.WORK else self._looks
        heapq.heappush(timers, (when, self.next_number(), handle, process, pause))
        return handle

    def start_travel(self, seconds: float) -> asyncio.Future[None]:
        """Return the end of the travel of a message; each command has two, so it costs less than any other sleep."""
        future = self.create_future()
        when = self._clock.monotonic() + seconds
        heapq.heappush(self._work, (when, self._number, future, _process.get(self.world), Pause.TRAVEL))
        return future

    def create_future(self) -> asyncio.Future[Any]:
        future = VirtualFuture(loop=self)
        self._number += 1
        future.number = self._number
        return future

    def create_task(
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
        **_: Any,
    ) -> asyncio.Task[T]:
        number = self._number + 1
        task = VirtualTask(coro, loop=self, name=name or f"Task-{number}", context=context)
        self._tasks.append(task)  # a dead process keeps its tasks: freed, they would run their `finally` blocks
        if len(self._tasks) >= self._looked_at:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._looked_at = 2 * len(self._tasks) + TASKS_KEPT
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  (belongs to the task that awaits it)
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Log nothing: the remains of a dead process are of no interest."""

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is skipped when its time comes."""

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._is_closed

    def is_closed(self) -> bool:
        return self._is_closed


def current_process() -> SimulatedProcess:
    """Return the process that is running."""
    return _process.get()
