"""Starts a worker process: secludes it, starts logging, reports bad settings, then runs Celery's worker, or several.

Several workers in one process have an application, a thread and an event loop each. When one of them ends, all end.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from celery import signals
from celery.worker import state
from kombu.asynchronous import set_event_loop

from broker.celery.app import make_worker
from broker.runtime import EXIT_USAGE, SYSTEM_CLOCK, DeckhandsError, harden_process, logs_json, start_logging

OUR_PACKAGES = ("broker", "controller_worker", "tool_worker", "deckhands")

OTHERS_LIMIT_SECONDS = 3.0
"""How long the first worker, when it has ended, waits for the others and for the thread beside them."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CeleryWorker:
    """A Celery worker of a process.

    Attributes:
        app_module: has `app`, a Celery application.
        role: names the worker in Flower and `celery inspect`: `<role>-<pid>@<host>`.
        options: options of Celery's worker, in addition to those of all our workers.
    """

    app_module: str
    role: str
    options: Mapping[str, Any] = field(default_factory=dict)


def run_worker(app_module: str, role: str, **options: Any) -> NoReturn:
    """Run the Celery worker of an application module until it is asked to stop, then end this process."""
    run_workers(role, [CeleryWorker(app_module, role, options)])


def run_workers(
    name: str, specs: Sequence[CeleryWorker], *, beside: Callable[[threading.Event], None] | None = None
) -> NoReturn:
    """Run Celery workers until one of them ends or the process is asked to stop, then end this process.

    Args:
        name: names the process in its log.
        specs: the first worker runs in the main thread, and its application is Celery's current one. Only the last one
            may use Celery's fast path, see `trace.setup_worker_optimizations`.
        beside: runs in another thread, until the event is set.
    """
    harden_process()
    start_logging(name, is_json=logs_json())
    for package in OUR_PACKAGES:  # Celery sets the level of all others to its own
        logging.getLogger(package).setLevel(logging.INFO)
    gc.disable()  # imports leave no garbage, and collections take a tenth of the import time
    try:
        apps = [importlib.import_module(spec.app_module).app for spec in specs]
    except DeckhandsError as error:
        if logs_json():
            _log.critical("%s", error)
        else:
            sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_USAGE)
    workers = []
    for app, spec in zip(apps, specs, strict=True):
        set_event_loop(None)  # else Celery would give all workers the event loop of the first
        workers.append(make_worker(app, f"{spec.role}-{os.getpid()}@%h", **spec.options))
    apps[0].set_current()
    apps[0].set_default()
    gc.freeze()  # imported modules stay
    gc.enable()
    is_over = threading.Event()
    others = [
        threading.Thread(target=_run, args=(worker,), name=worker.hostname, daemon=True) for worker in workers[1:]
    ]
    if beside is not None:
        others.append(threading.Thread(target=beside, args=(is_over,), name="beside", daemon=True))
    for other in others:
        other.start()
    _run(workers[0])
    is_over.set()
    deadline = SYSTEM_CLOCK.monotonic() + OTHERS_LIMIT_SECONDS
    for other in others:
        other.join(max(0.0, deadline - SYSTEM_CLOCK.monotonic()))
    sys.exit(max(int(worker.exitcode or 0) for worker in workers))


def _run(worker: Any) -> None:
    """Run a worker, and ask the other ones of this process to stop when it ends."""
    worker.start()
    if state.should_stop is None:
        state.should_stop = int(worker.exitcode or 0)
        signals.worker_shutting_down.send(sender=worker.hostname, sig="", how="Warm", exitcode=state.should_stop)
