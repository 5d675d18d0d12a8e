"""Two hundred conversations at once: how near one controller process comes to what the model's latency allows."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.bench import Bench, spread
from benchmarks.cluster import BACKENDS, BenchCluster, model_environment, model_server_arguments, running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.machine import cpu_seconds, peak_kib
from benchmarks.script import write_script
from tests.model_server.running_server import RunningModelServer

CONVERSATIONS = 200
STEPS = 10
"""Model calls of a conversation: nine that run a command and one that finishes."""
LATENCY_SECONDS = 1.0
TARGET = 1.15


@dataclass(frozen=True, slots=True)
class Crossing:
    """One run of all conversations."""

    seconds: float
    controller_cpu: float
    other_cpu: float
    peak_kib: float


async def measure(bench: Bench) -> Result:
    """Run the conversations with each backend, and with the peer, in turns."""
    count = bench.choose(smoke=10, short=CONVERSATIONS, full=CONVERSATIONS)
    ours: dict[str, list[Crossing]] = {name: [] for name in BACKENDS}
    theirs: list[dict[str, float]] = []
    async with running_cluster(bench.directory / "crowd") as cluster:
        script = write_script(cluster.directory / "crowd.json", STEPS - 1)
        server = RunningModelServer(model_server_arguments(script, latency_seconds=LATENCY_SECONDS))
        try:
            for _ in range(bench.choose(smoke=1, short=1, full=3)):
                for name in BACKENDS:
                    ours[name].append(await _cross(cluster, name, server, count))
                answer = await bench.peer("crowd", conversations=count, url=server.url)
                theirs += [answer] if answer else []
        finally:
            server.stop()
    ideal = STEPS * LATENCY_SECONDS
    steps = count * STEPS
    peer_wall = spread([run["seconds"] / ideal for run in theirs], scale=1)
    peer_cpu = spread([run["cpu"] / steps for run in theirs], scale=1_000)
    peer_peak = spread([run["rss_kib"] / 1024 for run in theirs], scale=1)
    figures = []
    for name, runs in ours.items():
        figures += [
            Figure(
                f"wall clock ÷ ideal, {name}",
                "",
                Spread.of(run.seconds / ideal for run in runs),
                TARGET if name == "anthropic" else None,
                peer_wall,
            ),
            Figure(
                f"controller CPU per step, {name}",
                "ms",
                Spread.of((run.controller_cpu / steps for run in runs), scale=1_000),
                None,
                peer_cpu,
            ),
            Figure(
                f"CPU per step of store and tool worker, {name}",
                "ms",
                Spread.of((run.other_cpu / steps for run in runs), scale=1_000),
            ),
            Figure(
                f"controller's peak memory, {name}",
                "MiB",
                Spread.of(run.peak_kib / 1024 for run in runs),
                None,
                peer_peak,
            ),
        ]
    note = (
        f"{count} conversations of {STEPS} steps, {LATENCY_SECONDS:g} s of model latency: {ideal:g} s is ideal. One "
        "controller process, one process of the no-op tool, and the store; the SDK: one process, a thread each. The "
        "model server is a separate process."
    )
    return Result("A crowd", figures, note)


async def _cross(cluster: BenchCluster, backend: str, server: RunningModelServer, count: int) -> Crossing:
    """Run all conversations once, from the first submit to the last finish, once the model's client is loaded."""
    controller = await cluster.start_controller(**model_environment(backend, server.url))
    tool = await cluster.start_noop_tool()
    await cluster.until_stepping(await cluster.submit())
    others = (cluster.store.child.pid, tool)
    cpu, other_cpu = cpu_seconds(controller), sum(map(cpu_seconds, others))
    began = time.perf_counter()
    for _ in range(count):
        await cluster.submit()
    await cluster.until_finished(count)
    crossing = Crossing(
        time.perf_counter() - began,
        cpu_seconds(controller) - cpu,
        sum(map(cpu_seconds, others)) - other_cpu,
        peak_kib(controller),
    )
    await cluster.stop_workers()
    return crossing
