"""Run a tool worker in the foreground: `python -m tool_worker`."""

from __future__ import annotations

from broker.celery import run_worker


def main() -> None:
    """Start the Celery worker with the flags it needs."""
    run_worker("tool_worker.app", "tool")


if __name__ == "__main__":
    main()
