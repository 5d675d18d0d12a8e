"""An evaluation whose workers and submitter are killed: `python -m benchmarks.eval_kills --count 500`.

The same attempts run twice: undisturbed, and while `--killed` of the controllers and tool workers, and the submitter,
get SIGKILL at times drawn from `--seed`. The dead workers stay dead; the submitter is started again. With `--faults`,
one model call in so many fails (429, 500, 503, no answer), in both runs. Printed: attempts accounted for, attempts
that were begun twice, whether scores are the same, and infrastructure failures per 1,000 conversations. Exits with 1
if something is missing, doubled or different.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import BenchCluster, running_cluster
from benchmarks.eval_in_flight import submitted
from benchmarks.machine import load
from benchmarks.submitter import ANSWER, RESULTS, Spec
from broker.conversations.selection import Selected, Selection
from deckhands.attempts.plan import LABEL
from deckhands.attempts.results import Row, read_results
from deckhands.attempts.statistics import summary_of

CODES = ("rate_limit", "internal", "service_unavailable", "timeout")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run."""

    rows: list[Row]
    conversations: int
    seconds: float

    def report(self, name: str, count: int) -> str:
        """Return it as text."""
        figures = summary_of(self.rows)["models"]["scripted"]
        return (
            f"{name}: {len(self.rows)} of {count} accounted for, {self.conversations - count} conversations more than "
            f"attempts, {figures['outcomes']['resolved']} resolved, {self.seconds:.1f} s; infrastructure failures "
            f"{figures['infrastructure_failures']}, {figures['infrastructure_failures_per_1000']:.1f} per 1,000 "
            f"conversations; waited for retries {figures['waiting_seconds']}"
        )

    @property
    def scores(self) -> dict[tuple[str, str, int], str]:
        """The outcome of each attempt."""
        return {row.key: row.outcome for row in self.rows}


def write_scripts(folder: Path, count: int, steps: int, latency: float, *, faults: int, seed: int) -> None:
    """Write a script for each attempt; every other one is right."""
    folder.mkdir(parents=True)
    chance = random.Random(seed)
    for number in range(count):
        turns: list[dict[str, object]] = []
        for at in range(steps):
            last = {"name": "finish", "arguments": {"message": f"FINAL ANSWER: {ANSWER if number % 2 else 7}"}}
            call = {"name": "execute_bash", "arguments": {"command": f"true {at}"}} if at < steps - 1 else last
            turn: dict[str, object] = {"latency_seconds": latency * chance.uniform(0.5, 1.5), "tool_calls": [call]}
            if faults and chance.randrange(faults) == 0:
                turn["error"] = {"code": chance.choice(CODES), "retry_after_seconds": 0.5}
            turns.append(turn)
        (folder / f"i{number}.json").write_text(json.dumps({"turns": turns}))


async def run(directory: Path, name: str, arguments: argparse.Namespace, *, kills: bool) -> Outcome:
    """Run all attempts once."""
    count = arguments.count
    async with running_cluster(directory / name) as cluster:
        starts = [cluster.start_controller] * arguments.controllers + [cluster.start_noop_tool] * arguments.tools
        pids = [await start() for start in starts]
        spec = Spec(cluster.store.url, name, count, arguments.at_once, "scripted", scripts=str(directory / "scripts"))
        path = spec.write(directory / f"{name}-out")
        running, began = await submitted(path), time.monotonic()
        if kills:
            running = await _kill(pids, running, path, arguments)
        while await running.wait() != 0:
            running = await submitted(path)
        seconds = time.monotonic() - began
        return Outcome(read_results(path.parent / RESULTS), await _begun(cluster, name), seconds)


async def _kill(
    pids: list[int], running: asyncio.subprocess.Process, path: Path, arguments: argparse.Namespace
) -> asyncio.subprocess.Process:
    """Kill a share of the workers, of each role fewer than all, and the submitter in their midst."""
    chance = random.Random(arguments.seed)
    roles = [pids[: arguments.controllers], pids[arguments.controllers :]]
    spared = {chance.choice(role) for role in roles}
    victims = [pid for pid in pids if pid not in spared]
    chance.shuffle(victims)
    victims = victims[: round(arguments.killed * len(pids))]
    wall = arguments.count / arguments.at_once * arguments.steps * arguments.latency
    pause = max(0.5, wall / (len(victims) + 2))
    print(f"{len(victims)} of {len(pids)} workers and the submitter get SIGKILL, {pause:.1f} s apart.", flush=True)
    for number, pid in enumerate(victims):
        await asyncio.sleep(pause)
        os.kill(pid, signal.SIGKILL)
        if number == len(victims) // 2 and running.returncode is None:
            running.kill()
            await running.wait()
            await asyncio.sleep(pause / 2)
            running = await submitted(path)
    return running


async def _begun(cluster: BenchCluster, name: str) -> int:
    number = 0
    async for page in Selected(cluster.client.store, Selection(labels={LABEL: name})).pages():
        number += len(page)
    return number


async def measure(directory: Path, arguments: argparse.Namespace) -> int:
    """Run both and compare them."""
    scripts = directory / "scripts"
    write_scripts(
        scripts, arguments.count, arguments.steps, arguments.latency, faults=arguments.faults, seed=arguments.seed
    )
    quiet = await run(directory, "undisturbed", arguments, kills=False)
    print(quiet.report("Undisturbed", arguments.count), flush=True)
    hurt = await run(directory, "disturbed", arguments, kills=True)
    print(hurt.report("Killed", arguments.count))
    known = sum(row.conversations for row in hurt.rows)
    doubled = len(hurt.rows) - len(hurt.scores) + max(0, hurt.conversations - known)
    is_same = quiet.scores == hurt.scores
    print(f"Doubled: {doubled}. Scores identical: {is_same}. Load {load():.1f}.")
    return 0 if len(hurt.scores) == arguments.count and not doubled and is_same else 1


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eval_kills", description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--latency", type=float, default=1.0, help="mean seconds of a model call")
    parser.add_argument("--at-once", type=int, default=100)
    parser.add_argument("--controllers", type=int, default=6)
    parser.add_argument("--tools", type=int, default=4)
    parser.add_argument("--killed", type=float, default=0.3, help="the share of workers")
    parser.add_argument("--faults", type=int, default=0, help="one call in so many fails; 0: none")
    parser.add_argument("--seed", type=int, default=1)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(measure(Path(folder), parser.parse_args())))


if __name__ == "__main__":
    main()
