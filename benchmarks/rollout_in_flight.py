"""Memory of rollouts in flight in one controller: `python -m benchmarks.rollout_in_flight --count 300`.

Each trajectory takes `--turns` steps at the stub engine, in a process of its own, whose tokens take `--token-seconds`
each. Nearly all of the time, replies are in flight. Memory is what the controller holds at the most beyond what it
holds after one trajectory. `--without-tokens` makes the same calls without their tokens, for the difference.

With `--trace` the controller runs under tracemalloc; it writes its largest owners when all trajectories are halfway.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.cluster import POLL_SECONDS, ROOT, BenchCluster, free_port, running_cluster
from benchmarks.eval_figures import Line, show
from benchmarks.machine import cpu_seconds, peak_kib, resident_kib
from broker.contract import AgentSpec, Limits, LLMSpec
from broker.log import Conversations
from deckhands.client import TaskSpec

TRACER = """
import gc, signal, tracemalloc
def write(*_):
    if not tracemalloc.is_tracing():
        return tracemalloc.start(12)
    gc.collect()
    found = tracemalloc.take_snapshot()
    for kind in ("lineno", "traceback"):
        for one in found.statistics(kind)[:{rows}]:
            print(f"{{one.size / 1024 / {count}:8.1f}} KiB each, {{one.count}} blocks", *one.traceback.format()[-8:],
                  sep="\\n", flush=True)
signal.signal(signal.SIGUSR2, write)
import runpy, sys
sys.argv = ["controller_worker"]
runpy.run_module("controller_worker", run_name="__main__", alter_sys=True)
"""
"""A controller that traces from the first signal on, and writes its largest owners at the second."""


async def measure(directory: Path, arguments: argparse.Namespace) -> int:
    """Run once and print the figures; 1 if a trajectory has no tokens or failed."""
    count, port = arguments.count, free_port()
    async with running_cluster(directory / "cluster") as cluster:
        options = ("--turns", str(arguments.turns), "--tool", "think", "--port", str(port))
        pace = ("--seconds-per-token", str(arguments.token_seconds))
        await cluster.start_site(port, "deckhands", "rollouts", "engine", *options, *pace)
        environment = {
            "LLM_MODEL": "openai/stub",
            "LLM_BASE_URL": f"http://127.0.0.1:{port}/v1",
            "LLM_API_KEY": "none",
            "LLM_ROLLOUT_API": arguments.api,
            "LLM_NATIVE_TOOL_CALLING": str(arguments.api != "completions").lower(),
            "DECKHANDS_MAX_CONVERSATIONS": str(count + 10),
        }
        if arguments.trace:
            (directory / "traced_controller.py").write_text(TRACER.format(rows=arguments.rows, count=count))
            environment |= {"PYTHONPATH": f"{ROOT}:{directory}"}
        module = "traced_controller" if arguments.trace else "controller_worker"
        pid = await cluster.start_controller(module=module, **environment)
        await _submit(cluster, 1, is_recording=not arguments.without_tokens)
        await cluster.until_finished(1)
        base, used = resident_kib(pid), cpu_seconds(pid)
        if arguments.trace:
            os.kill(pid, signal.SIGUSR2)
        await _submit(cluster, count, is_recording=not arguments.without_tokens)
        if arguments.trace:
            await _until_halfway(cluster, count, arguments.turns)
            os.kill(pid, signal.SIGUSR2)
        await cluster.until_finished(count)
        held = (peak_kib(pid) - base) / count
        used = cpu_seconds(pid) - used
        if arguments.trace:
            print(*(log.read_text() for log in directory.glob("cluster/traced_controller*.log")))
        rows = await Conversations(cluster.client.store).list_recent(limit=10)
        found = [await cluster.client.trajectory(row.conversation_id) for row in rows]
    tokens = [sum(len(segment.tokens) for segment in one.segments) for one in found]
    lines = [
        Line("memory of the controller in flight", round(held, 1), "KiB each", 100),
        Line("tokens of a trajectory at its end, median", statistics.median(tokens)),
        Line("CPU of a step", round(1_000 * used / count / (arguments.turns + 1), 2), "ms"),
    ]
    show("rollout_in_flight", f"{count:,} trajectories, {arguments.turns} turns, {arguments.api}", lines)
    return 0 if arguments.without_tokens or all(tokens) else 1


async def _submit(cluster: BenchCluster, count: int, *, is_recording: bool) -> None:
    task = TaskSpec(
        task="Find the answer.",
        agent=AgentSpec(llm=LLMSpec()),
        limits=Limits(max_iterations=1_000),
        rollout=is_recording,
    )
    await asyncio.gather(*(cluster.client.submit(task) for _ in range(count)))


async def _until_halfway(cluster: BenchCluster, count: int, turns: int) -> None:
    index = Conversations(cluster.client.store)
    while True:
        rows = await index.list_recent(limit=count)
        if sum(int(row.fields.get("iterations", "0")) for row in rows) > count * turns // 2:
            return
        await asyncio.sleep(POLL_SECONDS)


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout_in_flight", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--token-seconds", type=float, default=0.02)
    parser.add_argument("--api", choices=["chat", "chat_tokens", "completions"], default="completions")
    parser.add_argument("--without-tokens", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--rows", type=int, default=25, help="rows of a trace")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(measure(Path(folder), parser.parse_args())))


if __name__ == "__main__":
    main()
