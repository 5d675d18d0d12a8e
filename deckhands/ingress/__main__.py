"""Run an ingress worker in the foreground: `python -m deckhands.ingress`."""

from __future__ import annotations

from broker.celery import run_worker
from deckhands.ingress.ingress_app import CONCURRENCY, QUEUE


def main() -> None:
    """Start the Celery worker with the flags it needs."""
    run_worker("deckhands.ingress.app", "ingress", queues=[QUEUE], concurrency=CONCURRENCY, task_events=True)


if __name__ == "__main__":
    main()
