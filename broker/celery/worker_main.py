"""Starts a worker process: secludes it, starts logging, reports bad settings, then runs Celery's worker."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from typing import Any

from broker.celery.app import run_worker_app
from broker.runtime import EXIT_USAGE, DeckhandsError, harden_process, logs_json, start_logging

OUR_PACKAGES = ("broker", "controller_worker", "tool_worker", "deckhands")

_log = logging.getLogger(__name__)


def run_worker(app_module: str, role: str, **options: Any) -> None:
    """Run the Celery worker of an application module until it is asked to stop, then end this process.

    Args:
        app_module: has `app`, a Celery application.
        role: names the worker in Flower and `celery inspect`: `<role>-<pid>@<host>`.
        options: options of Celery's worker, in addition to those of all our workers.
    """
    harden_process()
    start_logging(role, is_json=logs_json())
    for package in OUR_PACKAGES:  # Celery sets the level of all others to its own
        logging.getLogger(package).setLevel(logging.INFO)
    gc.disable()  # imports leave no garbage, and collections take a tenth of the import time
    try:
        app = importlib.import_module(app_module).app
    except DeckhandsError as error:
        if logs_json():
            _log.critical("%s", error)
        else:
            sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_USAGE)
    gc.freeze()  # imported modules stay
    gc.enable()
    sys.exit(run_worker_app(app, f"{role}-{os.getpid()}@%h", **options))
