"""Run a controller worker in the foreground: `python -m controller_worker`."""

from __future__ import annotations

from broker.celery import run_worker


def main() -> None:
    """Start the Celery worker with the flags it needs."""
    run_worker("controller_worker.app", "controller")


if __name__ == "__main__":
    main()
