"""The asyncio loop inside a Celery worker: one thread, started and stopped with the worker.

Holds: a loop that ends by an error ends its process, because a worker that answers pings and does nothing is worse than
none. A worker that is asked to stop hands its work back and ends within `STOP_LIMIT_SECONDS`, even if the store is
unavailable.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from celery import Celery, bootsteps, signals

from broker.runtime import (
    EXIT_FUNCTIONS,
    EXIT_STORE_REPLACED,
    FunctionsReplaced,
    StoreReplaced,
    StoreTooNew,
    UsageError,
    harden_process,
)

HAND_BACK_SECONDS = 3.0
"""How long to wait for a silent store; without an answer, others take over when the heartbeat expires."""
STOP_LIMIT_SECONDS = 15.0
CALL_LIMIT_SECONDS = 15.0
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGQUIT})
EXIT_STOPPED = 0
EXIT_DEAD_LOOP = 70
EXIT_STATUSES = ((StoreReplaced, EXIT_STORE_REPLACED), ((FunctionsReplaced, StoreTooNew), EXIT_FUNCTIONS))
"""The exit status of a worker, by the errors that end its loop."""

_log = logging.getLogger(__name__)


class LoopService(Protocol):
    """The service that runs inside the worker."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then hand all work back and return."""
        ...

    def report(self) -> Mapping[str, Any]:
        """Return the fields for `inspect stats`. Called from another thread."""
        ...


async def cancel_when(stop: asyncio.Event, tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel the block as soon as the service is asked to stop."""
    await stop.wait()
    for task in tasks:
        task.cancel()


GC_THRESHOLDS = (5_000, 10, 60)
"""A full collection visits all conversations of a worker, which takes half a second for 2,000; so it must be rare."""


class LoopThread:
    """Runs a service on its own event loop in a thread."""

    def __init__(self, service: LoopService) -> None:
        self.service = service
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.stopping = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """A file that is readable from the request to stop on. It is never read."""
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)
        self._lock = threading.Lock()
        self._in_flight: set[Future[Any]] = set()
        self._is_over = False

    def start(self) -> None:
        """Start the thread and return at once."""
        gc.freeze()  # the some hundred thousand objects of a worker's modules never become garbage
        gc.set_threshold(*GC_THRESHOLDS)
        self._thread.start()

    def handle_signals(self) -> None:
        """Start stopping the service as soon as a signal arrives. Call this from the main thread.

        Python runs handlers in the main thread only, which may be blocked while it resolves the address of an
        unreachable broker.
        """
        signalled, noting = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(noting, warn_on_full_buffer=False)
        self._loop.call_soon_threadsafe(self._loop.add_reader, signalled, self._handle_signal, signalled)

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine on the service's loop from another thread and return its result."""
        return self.start_coroutine(coroutine).result(CALL_LIMIT_SECONDS)

    def start_coroutine(self, coroutine: Any) -> Future[Any]:
        """Start a coroutine on the service's loop from another thread. It is cancelled when the loop ends."""
        with self._lock:
            if self._is_over:
                coroutine.close()
                never: Future[Any] = Future()
                never.cancel()
                return never
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._in_flight.add(future)
        future.add_done_callback(self._in_flight.discard)
        return future

    def request_stop(self) -> None:
        """Ask the service to hand its work back, and return at once. Idempotent."""
        os.eventfd_write(self.stopping, 1)
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        """Ask the service to hand its work back, and wait for its end."""
        self.request_stop()
        self._thread.join(STOP_LIMIT_SECONDS)

    def _handle_signal(self, signalled: int) -> None:
        if STOP_SIGNALS & set(os.read(signalled, 4096)):
            self._stop.set()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
            with self._lock:
                self._is_over = True
            for future in list(self._in_flight):
                future.cancel()
        except BaseException as error:  # noqa: BLE001  (whatever it is, the process must not outlive its loop)
            causes = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
            expected = (UsageError, StoreReplaced, FunctionsReplaced, StoreTooNew)
            if not all(isinstance(cause, expected) for cause in causes):
                _log.exception("the loop died")
            for cause in causes:
                _log.critical("the worker ends: %s", cause)
            for kinds, status in EXIT_STATUSES:
                if any(isinstance(cause, kinds) for cause in causes):
                    os._exit(status)
            os._exit(EXIT_DEAD_LOOP)

    async def _serve(self) -> None:
        serving = asyncio.ensure_future(self.service.run(self._stop))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            _exit_after(STOP_LIMIT_SECONDS)
            await asyncio.wait((serving,), timeout=HAND_BACK_SECONDS)
            if not serving.done():
                _log.warning("the store does not answer; other workers take over when this worker's heartbeat expires")
                serving.cancel()
                await asyncio.wait((serving,))
        stopping.cancel()
        if not serving.cancelled():
            serving.result()


def _exit_after(seconds: float) -> None:
    """End this process after a while if it is still running.

    Clients of a vanished store or broker may block in the resolver or in the kernel, where no signal and no
    cancellation reaches them, and Python waits for their threads.
    """

    def end() -> None:
        _log.warning("the worker has not stopped within %s s; its process ends now", seconds)
        os._exit(EXIT_STOPPED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def add_loop(app: Celery, service: LoopService) -> LoopThread:
    """Make a Celery application's worker run a service. Returns the thread that will run it."""
    thread = LoopThread(service)
    app.stopping = thread.stopping

    class LoopStep(bootsteps.StartStopStep):  # type: ignore[misc]
        """Starts with the worker, not with its broker connection: a lost broker must not stop conversations."""

        requires = ("celery.worker.components:Pool",)

        def start(self, _worker: Any) -> None:
            if threading.current_thread() is threading.main_thread():
                thread.handle_signals()
            harden_process()  # for workers started by Celery's own command; ours are secluded already
            thread.start()

        def stop(self, _worker: Any) -> None:
            thread.stop()

        terminate = stop

        def info(self, _worker: Any) -> dict[str, Any]:
            return {"deckhands": dict(thread.service.report())}

    app.steps["worker"].add(LoopStep)
    # Celery may stop its steps up to a second after the signal.
    signals.worker_shutting_down.connect(lambda **_: thread.request_stop(), weak=False)
    return thread
