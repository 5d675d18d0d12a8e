"""Attempts of an evaluation in flight on one machine: `python -m benchmarks.eval_in_flight --count 2000`.

Each attempt has a scripted model whose latency is log-normal around `--latency`, and the no-op tool. Ideal is the
longest attempt, since all may begin at once. Printed: wall divided by ideal, memory of the controllers and of the
submitter by attempt, how late their loops were, and attempts that failed for no fault of the agent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
from pathlib import Path

from benchmarks.cluster import ROOT, BenchCluster, running_cluster
from benchmarks.machine import cpu_seconds, load, peak_kib, resident_kib
from benchmarks.submitter import ANSWER, RESULTS, USED, Spec
from deckhands.attempts.results import read_results
from deckhands.monitoring.workers import workers

SIGMA = 0.5
WATCH_SECONDS = 1.0


def write_scripts(folder: Path, count: int, steps: int, latency: float, seed: int) -> float:
    """Write a script for each attempt, and return how long the longest takes at least."""
    folder.mkdir(parents=True)
    chance, longest = random.Random(seed), 0.0
    for number in range(count):
        waits = [chance.lognormvariate(math.log(latency), SIGMA) if latency else 0.0 for _ in range(steps)]
        longest = max(longest, sum(waits))
        turns: list[dict[str, object]] = [
            {"latency_seconds": wait, "tool_calls": [{"name": "execute_bash", "arguments": {"command": f"true {at}"}}]}
            for at, wait in enumerate(waits[:-1])
        ]
        finish = {"name": "finish", "arguments": {"message": f"FINAL ANSWER: {ANSWER if number % 2 else 7}"}}
        turns.append({"latency_seconds": waits[-1], "tool_calls": [finish]})
        (folder / f"i{number}.json").write_text(json.dumps({"turns": turns}))
    return longest


async def submitted(path: Path) -> asyncio.subprocess.Process:
    """Start the submitter."""
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.submitter", str(path), cwd=ROOT)


async def measure(directory: Path, arguments: argparse.Namespace) -> int:
    """Run once and print what was found; 1 if an attempt is missing or has failed."""
    count = arguments.count
    ideal = write_scripts(directory / "scripts", count, arguments.steps, arguments.latency, arguments.seed)
    async with running_cluster(directory / "cluster") as cluster:
        pids = [await cluster.start_controller() for _ in range(arguments.controllers)]
        tool, store = await cluster.start_noop_tool(), await cluster.store_pid()
        base = {pid: resident_kib(pid) for pid in pids}
        before = {pid: cpu_seconds(pid) for pid in (*pids, tool, store)}
        spec = Spec(
            cluster.store.url,
            f"in-flight-{arguments.seed}",
            count,
            arguments.at_once or count,
            "scripted",
            scripts=str(directory / "scripts"),
            is_paced=arguments.paced,
        )
        running = await submitted(spec.write(directory / "out"))
        lag = await _lags(cluster, running)
        cpu = {pid: cpu_seconds(pid) - spent for pid, spent in before.items()}
        peaks = {pid: peak_kib(pid) - base[pid] for pid in pids}
    used = json.loads((directory / "out" / USED).read_text())
    rows = read_results(directory / "out" / RESULTS)
    failures = sum(len(row.failures) for row in rows)
    steps = sum(row.iterations for row in rows)
    own = used["peak_kib"] - used["base_kib"]
    print(f"{len(rows):,} of {count:,} attempts, {steps:,} steps, at most {used['most_under_way']:,} under way.")
    print(f"Wall {used['seconds']:.1f} s, ideal {ideal:.1f} s: {used['seconds'] / max(ideal, 0.001):.3f}.")
    print(f"Memory by attempt: controllers {sum(peaks.values()) / count:.1f} KiB, submitter {own / count:.1f} KiB.")
    print(f"Loop late: submitter p99 {1_000 * used['lag_p99']:.0f} ms; controllers at most {1_000 * lag:.0f} ms.")
    print(
        f"CPU by step: controllers {1_000 * sum(cpu[pid] for pid in pids) / steps:.2f} ms, store "
        f"{1_000 * cpu[store] / steps:.2f} ms, tool {1_000 * cpu[tool] / steps:.2f} ms, submitter "
        f"{1_000 * used['cpu'] / steps:.2f} ms."
    )
    print(f"Infrastructure failures: {failures}. Bound by: {'; '.join(used['bounds'])}. Load {load():.1f}.")
    return 0 if len(rows) == count and not failures else 1


async def _lags(cluster: BenchCluster, running: asyncio.subprocess.Process) -> float:
    """Wait for the submitter, and return how late a controller's loop was at most, as they say themselves."""
    latest = 0.0
    while running.returncode is None:
        for worker in await workers(cluster.client.store):
            if worker.role == "controller":
                latest = max(latest, worker.figures.get("loop_lag_seconds", {}).get("", 0.0))
        try:
            await asyncio.wait_for(running.wait(), WATCH_SECONDS)
        except TimeoutError:
            continue
    assert running.returncode == 0, "the submitter has failed"
    return latest


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eval_in_flight", description=__doc__)
    parser.add_argument("--count", type=int, default=2_000)
    parser.add_argument("--steps", type=int, default=4, help="model calls of an attempt")
    parser.add_argument("--latency", type=float, default=15.0, help="median seconds of a model call")
    parser.add_argument("--at-once", type=int, default=0, help="0: all")
    parser.add_argument("--paced", action="store_true", help="grow from few, and by what hosts say")
    parser.add_argument("--controllers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(measure(Path(folder), parser.parse_args())))


if __name__ == "__main__":
    main()
