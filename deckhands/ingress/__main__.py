"""Run an ingress worker in the foreground: `python -m deckhands.ingress`."""

from __future__ import annotations

from broker.celery import run_workers
from deckhands.ingress.ingress_app import INGRESS_WORKER


def main() -> None:
    """Start the Celery worker with the flags it needs."""
    run_workers(INGRESS_WORKER.role, [INGRESS_WORKER])


if __name__ == "__main__":
    main()
