"""The asyncio loop inside a Celery worker: one thread, started and stopped with the worker.

Holds: a loop that dies takes its process with it, because a worker that answers pings and does nothing is worse than
none; a worker that is told to stop hands back what it has before it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from celery import Celery, bootsteps, signals

STOP_TIMEOUT_SECONDS = 15.0
EXIT_DEAD_LOOP = 70

_log = logging.getLogger(__name__)


class LoopService(Protocol):
    """What runs inside the worker."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then hand back what is held and return."""
        ...

    def report(self) -> Mapping[str, Any]:
        """Return what `inspect stats` shows; called from another thread."""
        ...


class LoopThread:
    """Runs a service on a loop of its own."""

    def __init__(self, service: LoopService) -> None:
        self.service = service
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine of the service on its loop from another thread and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(STOP_TIMEOUT_SECONDS)

    def begin_to_stop(self) -> None:
        """Let the service hand back what it has; returns at once.  Idempotent."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        """Let the service hand back what it has, and wait for it."""
        self.begin_to_stop()
        self._thread.join(STOP_TIMEOUT_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self.service.run(self._stop))
        except BaseException as error:  # noqa: BLE001  (whatever it is, the process must not outlive its loop)
            _log.exception("the loop died")
            for cause in error.exceptions if isinstance(error, BaseExceptionGroup) else (error,):
                _log.critical("the worker ends: %s", cause)
            os._exit(EXIT_DEAD_LOOP)


def add_loop(app: Celery, service: LoopService) -> LoopThread:
    """Make a Celery application's worker run a service; returns the thread it will run in."""
    thread = LoopThread(service)

    class LoopStep(bootsteps.StartStopStep):  # type: ignore[misc]
        """Starts with the worker, not with its broker connection: a lost broker must not stop conversations."""

        requires = ("celery.worker.components:Pool",)

        def start(self, _worker: Any) -> None:
            thread.start()

        def stop(self, _worker: Any) -> None:
            thread.stop()

        terminate = stop

        def info(self, _worker: Any) -> dict[str, Any]:
            return {"deckhands": dict(thread.service.report())}

    app.steps["worker"].add(LoopStep)
    # Celery gets round to stopping its steps up to a second after the signal.
    signals.worker_shutting_down.connect(lambda **_: thread.begin_to_stop(), weak=False)
    return thread
