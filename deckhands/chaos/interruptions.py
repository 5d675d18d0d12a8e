"""`deckhands up --chaos`: the workers of a cluster in development are killed and stopped now and then.

The supervisor of the cluster does it to its own children, so nothing has to be found or proven.
"""

from __future__ import annotations

import asyncio
import signal
from hashlib import sha256

from deckhands.cluster import Cluster, Notice

STOP_SHARE = 0.3
"""The share of workers that are stopped for a while; the others are killed."""
STOP_SECONDS = 4.0


async def interrupt_workers(cluster: Cluster, *, every_seconds: float, seed: int, on_notice: Notice) -> None:
    """Kill or stop a random worker after each random pause; never returns.

    A stopped worker is continued, even if this call is cancelled.

    Args:
        every_seconds: the mean pause; each pause is 0.5 to 1.5 times as long.
        seed: determines the pauses and the workers.
    """
    number = 0

    def draw() -> float:
        nonlocal number
        number += 1
        return int.from_bytes(sha256(f"{seed} {number}".encode()).digest()[:6], "big") / (1 << 48)

    names = sorted(cluster.workers)
    while True:
        await asyncio.sleep(every_seconds * (0.5 + draw()))
        worker = cluster.workers[names[int(draw() * len(names))]]
        is_stop = draw() < STOP_SHARE
        child = worker.child
        if child is None or child.exit_status is not None:
            continue
        if not is_stop:
            on_notice(f"chaos: SIGKILL to {worker.name} (pid {child.pid})")
            child.send(signal.SIGKILL)
            continue
        on_notice(f"chaos: SIGSTOP to {worker.name} (pid {child.pid}) for {STOP_SECONDS:g} s")
        child.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(STOP_SECONDS)
        finally:
            child.send(signal.SIGCONT)
