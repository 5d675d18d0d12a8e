"""Run a worker of jobs in the foreground: `python -m deckhands.operations.jobs`."""

from __future__ import annotations

from broker.celery import run_worker
from deckhands.operations.jobs.celery_app import JOBS_CONCURRENCY, JOBS_QUEUE
from deckhands.operations.jobs.service import ROLE


def main() -> None:
    """Start the Celery worker with the flags it needs."""
    run_worker(
        "deckhands.operations.jobs.app", ROLE, queues=[JOBS_QUEUE], concurrency=JOBS_CONCURRENCY, task_events=True
    )


if __name__ == "__main__":
    main()
