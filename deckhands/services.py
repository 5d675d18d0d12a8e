"""Run an ingress worker, a jobs worker and a beat in one process: `python -m deckhands.services`.

On one machine this saves the memory of two processes. `deckhands ingress`, `jobs` and `beat` run each in its own
process.

Holds: each has its own Celery application, queue, limits and event loop. If a worker ends, all end, and their
supervisor restarts all. A failed beat restarts by itself.
"""

from __future__ import annotations

from broker.celery import run_workers
from broker.runtime import SERVICES
from deckhands.ingress import INGRESS_WORKER
from deckhands.operations import JOBS_WORKER, run_beat_until


def main() -> None:
    """Start them."""
    run_workers(SERVICES, [INGRESS_WORKER, JOBS_WORKER], beside=run_beat_until)


if __name__ == "__main__":
    main()
