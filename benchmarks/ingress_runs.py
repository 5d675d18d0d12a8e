"""Throughput and cost of short runs through one ingress and one controller, from `send_task` to the result.

The model is scripted and finishes at once, so a run is one Celery message, a conversation of one step, its notice and
its result. All runs are sent before the first one is looked at. In turn with them, a worker of plain Celery carries out
as many tasks that do nothing.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from celery import Celery

from benchmarks.bench import Bench
from benchmarks.cluster import running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.machine import cpu_seconds
from benchmarks.plain_celery import QUEUE as PLAIN_QUEUE
from benchmarks.plain_celery import TASK
from benchmarks.script import write_script

QUEUE = "deckhands"
WARM_UP_RUNS = 20
LIMIT_SECONDS = 600.0
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Round:
    """What one round took.

    Attributes:
        cpu: of each process, in seconds for one task.
    """

    tasks_a_second: float
    cpu: tuple[float, ...]


async def measure(bench: Bench) -> Result:
    """Send crowds of short runs to one ingress and one controller."""
    count = bench.choose(smoke=20, short=500, full=2_000)
    async with running_cluster(bench.directory / "ingress_runs") as cluster:
        plain = (await cluster.start_plain_celery(), cluster.store.child.pid)
        pids = (await cluster.start_ingress(), await cluster.start_controller(), cluster.store.child.pid)
        model = f"scripted/{write_script(cluster.directory / 'at-once.json', 0)}"
        app = Celery("benchmark", broker=cluster.store.celery_url, backend=cluster.store.celery_url)
        run, nothing = ("deckhands.run", ["Do it."], {"model": model}, QUEUE), (TASK, (), {}, PLAIN_QUEUE)
        await _round(app, run, WARM_UP_RUNS, pids)
        await _round(app, nothing, WARM_UP_RUNS, plain)
        rounds, plains = [], []
        for _ in range(bench.choose(smoke=1, short=3, full=5)):
            rounds.append(await _round(app, run, count, pids))
            plains.append(await _round(app, nothing, count, plain))
    names = ("ingress", "controller", "store")
    figures = [
        Figure("runs a second", "", Spread.of(found.tasks_a_second for found in rounds)),
        *(
            Figure(f"{name} CPU of a run", "ms", Spread.of((found.cpu[place] for found in rounds), scale=1_000))
            for place, name in enumerate(names)
        ),
        Figure("plain Celery: tasks a second", "", Spread.of(found.tasks_a_second for found in plains)),
        Figure("plain Celery: worker CPU of a task", "ms", Spread.of((one.cpu[0] for one in plains), scale=1_000)),
        Figure("plain Celery: store CPU of a task", "ms", Spread.of((one.cpu[1] for one in plains), scale=1_000)),
        Figure(
            "ingress CPU ÷ plain Celery's",
            "",
            Spread.of(run.cpu[0] / plain.cpu[0] for run, plain in zip(rounds, plains, strict=True)),
        ),
    ]
    note = f"{count:,} one-step runs, sent at once; one ingress, one controller, and the store is the broker too."
    return Result("Runs through the ingress", figures, note)


async def _round(app: Celery, task: tuple[str, Any, dict[str, Any], str], count: int, pids: tuple[int, ...]) -> Round:
    name, arguments, options, queue = task

    def send() -> list[str]:
        return [app.send_task(name, arguments, options, queue=queue).id for _ in range(count)]

    before, began = [cpu_seconds(pid) for pid in pids], time.perf_counter()
    waiting = set(await asyncio.to_thread(send))
    async with asyncio.timeout(LIMIT_SECONDS):
        while waiting:
            waiting -= await asyncio.to_thread(_ended, app, waiting)
            await asyncio.sleep(POLL_SECONDS if len(waiting) < count // 10 else 10 * POLL_SECONDS)
    took = time.perf_counter() - began
    return Round(count / took, tuple((cpu_seconds(pid) - was) / count for pid, was in zip(pids, before, strict=True)))


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
