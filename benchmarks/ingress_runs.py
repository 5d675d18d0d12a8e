"""Throughput and cost of short runs through one ingress and one controller, from `send_task` to the result.

The model is scripted and finishes at once, so a run is one Celery message, a conversation of one step, its notice and
its result. All runs are sent before the first one is looked at.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from celery import Celery

from benchmarks.bench import Bench
from benchmarks.cluster import running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.machine import cpu_seconds
from benchmarks.script import write_script

QUEUE = "deckhands"
WARM_UP_RUNS = 20
LIMIT_SECONDS = 600.0
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Round:
    """What one round took, each divided by its runs."""

    runs_a_second: float
    ingress: float
    controller: float
    store: float


async def measure(bench: Bench) -> Result:
    """Send crowds of short runs to one ingress and one controller."""
    count = bench.choose(smoke=20, short=500, full=2_000)
    async with running_cluster(bench.directory / "ingress_runs") as cluster:
        pids = (await cluster.start_ingress(), await cluster.start_controller(), cluster.store.child.pid)
        model = f"scripted/{write_script(cluster.directory / 'at-once.json', 0)}"
        app = Celery("benchmark", broker=cluster.store.celery_url, backend=cluster.store.celery_url)
        await _round(app, model, WARM_UP_RUNS, pids)
        repeats = bench.choose(smoke=1, short=3, full=5)
        rounds = [await _round(app, model, count, pids) for _ in range(repeats)]
    figures = [
        Figure("runs a second", "", Spread.of(found.runs_a_second for found in rounds)),
        Figure("ingress CPU of a run", "ms", Spread.of((found.ingress for found in rounds), scale=1_000)),
        Figure("controller CPU of a run", "ms", Spread.of((found.controller for found in rounds), scale=1_000)),
        Figure("store CPU of a run", "ms", Spread.of((found.store for found in rounds), scale=1_000)),
    ]
    note = f"{count:,} one-step runs, sent at once; one ingress, one controller, and the store is the broker too."
    return Result("Runs through the ingress", figures, note)


async def _round(app: Celery, model: str, count: int, pids: tuple[int, int, int]) -> Round:
    def send() -> list[str]:
        options = {"model": model}
        return [app.send_task("deckhands.run", ["Do it."], options, queue=QUEUE).id for _ in range(count)]

    before, began = [cpu_seconds(pid) for pid in pids], time.perf_counter()
    waiting = set(await asyncio.to_thread(send))
    async with asyncio.timeout(LIMIT_SECONDS):
        while waiting:
            waiting -= await asyncio.to_thread(_ended, app, waiting)
            await asyncio.sleep(POLL_SECONDS if len(waiting) < count // 10 else 10 * POLL_SECONDS)
    took = time.perf_counter() - began
    used = [(cpu_seconds(pid) - was) / count for pid, was in zip(pids, before, strict=True)]
    return Round(count / took, *used)


def _ended(app: Celery, waiting: set[str]) -> set[str]:
    """Return the tasks that have succeeded, in one look at all of them.

    Raises:
        AssertionError: one of them has failed.
    """
    ids = sorted(waiting)
    found = app.backend.client.mget([app.backend.get_key_for_task(task_id) for task_id in ids])
    states = {
        task_id: app.backend.decode_result(text)["status"]
        for task_id, text in zip(ids, found, strict=True)
        if text is not None
    }
    failed = [task_id for task_id, state in states.items() if state == "FAILURE"]
    assert not failed, f"the task {failed[0]} failed"
    return {task_id for task_id, state in states.items() if state == "SUCCESS"}
