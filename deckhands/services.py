"""Run an ingress worker, a jobs worker and a beat in one process: `python -m deckhands.services`.

On one machine this saves the memory of two processes. `deckhands ingress`, `jobs` and `beat` run each by itself.

Holds: each has its own Celery application, queue, limits and event loop. If a worker ends, all end, and the process
that supervises them starts all again. A beat that fails starts again by itself.
"""

from __future__ import annotations

import threading

from broker.celery import CeleryWorker, run_workers
from broker.runtime import SERVICES
from deckhands.ingress.ingress_app import CONCURRENCY, QUEUE
from deckhands.operations.jobs.celery_app import JOBS_CONCURRENCY, JOBS_QUEUE, run_beat_until
from deckhands.operations.jobs.service import ROLE

WORKERS = (
    CeleryWorker(
        "deckhands.ingress.app", "ingress", {"queues": [QUEUE], "concurrency": CONCURRENCY, "task_events": True}
    ),
    CeleryWorker(
        "deckhands.operations.jobs.app",
        ROLE,
        {"queues": [JOBS_QUEUE], "concurrency": JOBS_CONCURRENCY, "task_events": True},
    ),
)


def main() -> None:
    """Start them."""
    run_workers(SERVICES, WORKERS, beside=_beat)


def _beat(is_over: threading.Event) -> None:
    from deckhands.operations.jobs.app import app

    run_beat_until(app, is_over)


if __name__ == "__main__":
    main()
