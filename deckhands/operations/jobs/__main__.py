"""Run a worker of jobs in the foreground: `python -m deckhands.operations.jobs`."""

from __future__ import annotations

from broker.celery import run_workers
from deckhands.operations.jobs.celery_app import JOBS_WORKER


def main() -> None:
    """Start the Celery worker with the flags it needs."""
    run_workers(JOBS_WORKER.role, [JOBS_WORKER])


if __name__ == "__main__":
    main()
