"""Memory of rollouts in flight in one controller: `python -m benchmarks.rollout_in_flight --count 300`.

Each trajectory takes `--turns` steps at the stub engine, in a separate process, whose tokens take `--token-seconds`
each: a reply has about two hundred. Nearly all of the time, replies are in flight. Memory is what the controller holds
at the most beyond what it holds after one trajectory. `--without-tokens` makes the same calls without their tokens,
for the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.cluster import BenchCluster, free_port, running_cluster
from benchmarks.eval_figures import Line, show
from benchmarks.machine import cpu_seconds, peak_kib, resident_kib
from broker.contract import AgentSpec, Limits, LLMSpec
from broker.log import Conversations
from deckhands.client import TaskSpec


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
        pid = await cluster.start_controller(**environment)
        await _submit(cluster, 1, is_recording=not arguments.without_tokens)
        await cluster.until_finished(1)
        base, used = resident_kib(pid), cpu_seconds(pid)
        await _submit(cluster, count, is_recording=not arguments.without_tokens)
        await cluster.until_finished(count)
        held = (peak_kib(pid) - base) / count
        used = cpu_seconds(pid) - used
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


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout_in_flight", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--token-seconds", type=float, default=0.15)
    parser.add_argument("--api", choices=["chat", "chat_tokens", "completions"], default="completions")
    parser.add_argument("--without-tokens", action="store_true")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(measure(Path(folder), parser.parse_args())))


if __name__ == "__main__":
    main()
