"""How long results take to arrive while 40,000 short messages wait in the ingress's queue.

Runs start before the backlog is there, and their controller after it, so each ends while the ingress works through the
backlog. The time counts from the conversation's end to the result in the backend.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from celery import Celery

from benchmarks.bench import Bench
from benchmarks.cluster import running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.script import write_script

QUEUE = "deckhands"
RUNS = 20
DELAY_TARGET_SECONDS = 1.0
PUSHED_AT_ONCE = 2_000
LIMIT_SECONDS = 300.0
POLL_SECONDS = 0.01


async def measure(bench: Bench) -> Result:
    """Let runs end behind a backlog."""
    backlog = choose_backlog(bench)
    delays, left, rate = await run_behind(backlog, bench.directory / "ingress_backlog")
    figures = [
        Figure("from the end of a run to its result", "s", Spread.of(delays), DELAY_TARGET_SECONDS),
        Figure("messages left when all results are there", "", Spread.of([float(left)])),
        Figure("short messages a second", "", Spread.of([rate])),
    ]
    return Result("Results behind a backlog", figures, f"{RUNS} runs, {backlog:,} messages of `deckhands.pause`.")


def choose_backlog(bench: Bench) -> int:
    """Return how many messages wait."""
    return bench.choose(smoke=2_000, short=40_000, full=40_000)


async def run_behind(backlog: int, directory: Path) -> tuple[list[float], int, float]:
    """Let runs end behind so many messages; a separate cluster has its files in a new directory.

    Returns:
        The seconds from the end of each run to its result, the messages left when all results were there, and the
        messages a second after that.
    """
    async with running_cluster(directory) as cluster:
        await cluster.start_ingress()
        model = f"scripted/{write_script(cluster.directory / 'at-once.json', 0)}"
        app = Celery("benchmark", broker=cluster.store.celery_url, backend=cluster.store.celery_url)
        ids = [app.send_task("deckhands.run", ["Do it."], {"model": model}, queue=QUEUE).id for _ in range(RUNS)]
        await _until_queue(app, lambda length: length == 0)
        await asyncio.to_thread(_fill, app, backlog)
        await cluster.start_controller()
        delays = await _delays(app, ids)
        left: int = app.backend.client.llen(QUEUE)
        began = time.perf_counter()
        await _until_queue(app, lambda length: length <= left - backlog // 40)
        return delays, left, backlog / 40 / (time.perf_counter() - began)


def _fill(app: Celery, count: int) -> None:
    """Queue one short message many times, each under another id, in few commands."""
    client = app.backend.client
    app.send_task("deckhands.pause", ["none"], queue="unread", task_id="pause-id", ignore_result=True)
    text = client.lpop("unread")
    for start in range(0, count, PUSHED_AT_ONCE):
        numbers = range(start, start + PUSHED_AT_ONCE)
        client.lpush(QUEUE, *(text.replace(b"pause-id", b"pause-%d" % number) for number in numbers))


async def _delays(app: Celery, ids: list[str]) -> list[float]:
    """Wait for all results, and return how long after the end of its conversation each was there."""
    found: dict[str, float] = {}
    async with asyncio.timeout(LIMIT_SECONDS):
        while len(found) < len(ids):
            waiting = [task_id for task_id in ids if task_id not in found]
            texts = app.backend.client.mget([app.backend.get_key_for_task(task_id) for task_id in waiting])
            now = datetime.now(UTC)
            for task_id, text in zip(waiting, texts, strict=True):
                meta = app.backend.decode_result(text) if text else {"status": "PENDING"}
                assert meta["status"] != "FAILURE", meta
                if meta["status"] == "SUCCESS":
                    found[task_id] = (now - datetime.fromisoformat(meta["result"]["updated"])).total_seconds()
            await asyncio.sleep(POLL_SECONDS)
    return list(found.values())


async def _until_queue(app: Celery, is_enough: Callable[[int], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not is_enough(app.backend.client.llen(QUEUE)):
            await asyncio.sleep(POLL_SECONDS)
