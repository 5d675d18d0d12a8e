"""What encryption at rest costs, in pairs without and with it: appends, whole steps, and to delete a tenant's key."""

from __future__ import annotations

import asyncio
import base64
import os
import time

from benchmarks.bench import Bench
from benchmarks.cluster import BenchCluster, running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.machine import on_one_core
from benchmarks.recording import WAYS
from benchmarks.stepping import StepWatch, mean_of, noop_tool, run_steps
from broker.contract.events import ConversationCreated
from broker.contract.specs import Tenancy
from broker.log.event_log import EventLog
from broker.runtime.errors import DataLocked
from broker.store.store import open_store

KEYS = f"benchmark:{base64.b64encode(os.urandom(32)).decode()}"
WARM_UP_STEPS = 50
COST_TARGET_PERCENT = 10.0
DELETED_TARGET_SECONDS = 1.0
AT_ONCE = 256


async def measure(bench: Bench) -> Result:
    """Do the same on a cluster that encrypts and on one that does not, in turns; then delete a key of many logs."""
    steps, rounds = bench.choose(smoke=12, short=500, full=1_000), bench.choose(smoke=1, short=7, full=15)
    appends = bench.choose(smoke=20, short=300, full=300)
    logs = bench.choose(smoke=50, short=100_000, full=100_000)
    found: dict[tuple[str, bool], list[float]] = {}
    async with (
        running_cluster(bench.directory / "off") as off,
        running_cluster(bench.directory / "on", masters=KEYS) as on,
    ):
        clusters = {False: off, True: on}
        controllers = {False: await off.start_controller(), True: await on.start_controller()}
        async with noop_tool(off) as plain, noop_tool(on) as encrypted:
            seats = {False: plain, True: encrypted}
            for is_on in (False, True):
                await run_steps(clusters[is_on], seats[is_on], StepWatch(controllers[is_on]), WARM_UP_STEPS)
            for number in range(rounds):
                for is_on in (True, False) if number % 2 else (False, True):
                    cluster = clusters[is_on]
                    watch = StepWatch(controllers[is_on], (cluster.store.child.pid, os.getpid()))
                    await run_steps(cluster, seats[is_on], watch, steps)
                    whole = (watch.whole_cpu[-1] - watch.whole_cpu[0]) / (steps - 1)
                    for name, value in (("controller", mean_of(watch)), ("whole", whole)):
                        found.setdefault((name, is_on), []).append(value)
        for cluster in clusters.values():
            await cluster.stop_workers()  # they would claim the conversations of this process
        for number in range(rounds):
            for is_on in (True, False) if number % 2 else (False, True):
                with on_one_core(await clusters[is_on].store_pid()):
                    found.setdefault(("cycle", is_on), []).append(await WAYS["cycle"](clusters[is_on], appends))
        deleted_seconds = await _delete_key(on, logs)

    def pair(name: str, text: str) -> list[Figure]:
        off_values, on_values = found[name, False], found[name, True]
        costs = [after / before - 1 for before, after in zip(off_values, on_values, strict=True)]
        return [
            Figure(f"{text}, off", "ms", Spread.of(off_values, scale=1_000)),
            Figure(f"{text}, on", "ms", Spread.of(on_values, scale=1_000)),
            Figure(f"{text}: cost of encryption", "%", Spread.of(costs, scale=100), COST_TARGET_PERCENT),
        ]

    figures = [
        *pair("whole", "CPU of a step, all processes"),
        *pair("controller", "controller CPU of a step"),
        *pair("cycle", "append an action, then its observation, on one core"),
        Figure(
            f"from the deletion of a key until a reader that has used it is refused each of {logs:,} logs",
            "s",
            Spread.of([deleted_seconds]),
            DELETED_TARGET_SECONDS,
        ),
    ]
    note = (
        f"{rounds} rounds of {steps} steps each way, in turns; a cost is that of each pair. A scripted model inside "
        "the controller and a no-op tool, so a step costs as little as it can."
    )
    return Result("Encryption at rest", figures, note)


async def _delete_key(cluster: BenchCluster, count: int) -> float:
    """Delete the key of a tenant with so many logs; return the seconds until another process can read none."""
    store, tenancy = cluster.client.store, Tenancy(tenant="large")
    names, log = [f"large-{number}" for number in range(count)], cluster.client.log

    async def create(name: str) -> None:
        await log.create(ConversationCreated(conversation_id=name, tenancy=tenancy), key="begin")

    for at in range(0, count, AT_ONCE):
        await asyncio.gather(*map(create, names[at : at + AT_ONCE]))
    other = await open_store(cluster.store.url, masters=store.masters)
    reader = EventLog(other)
    for name in names[:: max(1, count // 1_000)]:
        assert len(await reader.read(name)) == 1
    began = time.perf_counter()
    await store.encryption.delete_key("large")
    while await _is_readable(reader, names[0]):
        await asyncio.sleep(0.005)
    seconds = time.perf_counter() - began
    for at in range(0, count, AT_ONCE):
        readable = await asyncio.gather(*(_is_readable(reader, name) for name in names[at : at + AT_ONCE]))
        assert not any(readable)
    await other.aclose()
    return seconds


async def _is_readable(log: EventLog, conversation_id: str) -> bool:
    try:
        await log.read(conversation_id)
    except DataLocked:
        return False
    return True
