"""What a conversation leaves in a controller's memory: while it waits, and when it has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from benchmarks.bench import Bench
from benchmarks.cluster import BenchCluster, running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.machine import resident_kib
from benchmarks.script import write_script
from broker.log.conversations import ConversationRow, Conversations

IDLE_SECONDS = 4.0
GONE_TARGET_KIB = 1.0
LIMIT_SECONDS = 120.0
POLL_SECONDS = 0.2
NOBODY = "nobody"
"""A pool that no tool worker serves."""


async def measure(bench: Bench) -> Result:
    """Let conversations come and go, then let others wait for a tool that never answers."""
    count = bench.choose(smoke=20, short=2_000, full=5_000)
    held = bench.choose(smoke=20, short=1_000, full=2_000)
    before_them = bench.choose(smoke=20, short=8_000, full=10_000)
    async with running_cluster(bench.directory / "idling") as cluster:
        controller = await cluster.start_controller(DECKHANDS_IDLE_SECONDS=str(IDLE_SECONDS))
        await cluster.start_noop_tool()
        model = f"scripted/{write_script(cluster.directory / 'short.json', 1)}"
        await _come_and_go(cluster, model, before_them)  # until caches are full and the allocator has what it wants
        before = resident_kib(controller)
        await _come_and_go(cluster, model, count)
        gone = (resident_kib(controller) - before) / count
        before = resident_kib(controller)
        while_held, after_release = await _wait_for_nobody(cluster, controller, model, held)
    answer = await bench.peer("hold", conversations=bench.choose(smoke=3, short=30, full=100))
    peer = Spread.of(answer["kib"]) if answer else None
    figures = (
        Figure(f"left behind by each of {count:,} that came and went", "KiB", Spread.of([gone]), GONE_TARGET_KIB),
        Figure(f"each of {held:,} that wait for a tool", "KiB", Spread.of([(while_held - before) / held]), None, peer),
        Figure("each of them after its release", "KiB", Spread.of([(after_release - before) / held])),
    )
    note = (
        f"Resident memory of the controller process, divided by conversations, after {before_them:,} of them; it gives "
        f"back one that has waited {IDLE_SECONDS:g} s here (30 s by default). The allocator keeps pages for the next "
        "ones. The SDK: each conversation object that is kept, after a run of one step."
    )
    return Result("Idling", figures, note)


async def _come_and_go(cluster: BenchCluster, model: str, count: int) -> None:
    for start in range(0, count, 100):
        batch = min(100, count - start)
        for _ in range(batch):
            await cluster.submit(model=model)
        await cluster.until_finished(batch)


async def _wait_for_nobody(cluster: BenchCluster, controller: int, model: str, count: int) -> tuple[float, float]:
    """Return the controller's memory while it holds all of them, and once it has let go of them."""
    ids = {await cluster.submit(model=model, pool=NOBODY) for _ in range(count)}
    await _until(cluster, ids, lambda row: row.wait_reason == "tool")
    while_held = resident_kib(controller)
    await _until(cluster, ids, lambda row: not row.owner)
    return while_held, resident_kib(controller)


async def _until(cluster: BenchCluster, ids: set[str], is_so: Callable[[ConversationRow], bool]) -> None:
    index = Conversations(cluster.client.store)
    async with asyncio.timeout(LIMIT_SECONDS):
        while not all(is_so(row) for row in await index.list_recent(limit=len(ids)) if row.conversation_id in ids):
            await asyncio.sleep(POLL_SECONDS)
