"""An evaluation whose workers and submitter are killed: `python -m benchmarks.eval_kills --count 500`.

The same attempts run twice on the local model server: undisturbed, and while `--killed` of the controllers and tool
workers, and the submitter, get SIGKILL. The dead workers stay dead; the submitter is started again. Every other attempt
is right. Printed: attempts accounted for, attempts that were begun twice, whether scores are the same, and model calls
that were made again. inspect_ai then does the same attempts as an eval set, gets SIGKILL in their middle, and is called
again; it is one process, so that is all there is to kill. With `--faults`, one call in so many fails (429, 500, 503, a
connection that breaks off) in both runs, for infrastructure failures per 1,000 conversations. Exits with 1 if something
is missing, doubled or different.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import ROOT, BenchCluster, model_environment, model_server_arguments, running_cluster
from benchmarks.eval_crowd import PEER, PEER_LIMIT_SECONDS, peer_missing
from benchmarks.eval_figures import Line, show
from benchmarks.eval_in_flight import submitted, write_script
from benchmarks.submitter import RESULTS, Spec
from broker.log.selection import ConversationQuery, Selection
from deckhands.evaluation.attempts.plan import LABEL
from deckhands.evaluation.attempts.results import AttemptRow, read_results
from deckhands.evaluation.attempts.statistics import compute_summary
from tests.model_server.running_server import RunningModelServer

LOOK_SECONDS = 0.1
KINDS = ("rate_limit", "server_error", "unavailable", "reset")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run.

    Attributes:
        conversations: that were begun.
        calls: that the model server received.
    """

    rows: list[AttemptRow]
    conversations: int
    seconds: float
    calls: int

    def lines(self, name: str, count: int, steps: int) -> list[Line]:
        """Return what was found."""
        (figures,) = compute_summary(self.rows)["models"].values()
        failures = figures["infrastructure_failures_per_1000"]
        lines = [
            Line(f"{name}: attempts with a result", len(self.rows), f"of {count:,}"),
            Line(f"{name}: resolved", figures["outcomes"]["resolved"]),
            Line(f"{name}: wall", round(self.seconds, 1), "s"),
            Line(f"{name}: infrastructure failures", round(failures, 1), "per 1,000 conversations", 0),
        ]
        codes = Counter(code for row in self.rows for code in row.failures)
        lines += [Line(f"{name}: of them {code}", found) for code, found in codes.most_common()]
        return [*lines, Line(f"{name}: model calls more than needed", self.calls - count * steps, "", None)]

    @property
    def scores(self) -> dict[tuple[str, str, int], str]:
        """The outcome of each attempt."""
        return {row.key: row.outcome for row in self.rows}


def fault_plan(calls: int, faults: int, seed: int) -> str:
    """Return a plan of the model server in which about one call in so many fails, in the order in which they come."""
    chance, plan = random.Random(seed), list[dict[str, object]]()
    for _ in range(2 * calls // faults):
        plan.append({"kind": "none", "times": max(1, round(chance.expovariate(1 / (faults - 1))))})
        plan.append({"kind": chance.choice(KINDS), "retry_after": "0.5"})
    return json.dumps(plan)


async def run(directory: Path, name: str, arguments: argparse.Namespace, *, kills: bool) -> Outcome:
    """Run all attempts once."""
    count = arguments.count
    script = write_script(directory / "script.json", arguments.steps)
    options = model_server_arguments(script, latency_seconds=arguments.latency)
    if arguments.faults:
        options = (*options, "--faults", fault_plan(count * arguments.steps, arguments.faults, arguments.seed))
    server = RunningModelServer(options)
    environment = model_environment("openai", server.url)
    try:
        async with running_cluster(directory / name) as cluster:
            pids = [await cluster.start_controller(**environment) for _ in range(arguments.controllers)]
            pids += [await cluster.start_noop_tool() for _ in range(arguments.tools)]
            spec = Spec(
                cluster.store.url,
                name,
                count,
                arguments.at_once,
                environment["LLM_MODEL"],
                is_every_other_wrong=True,
            )
            path = spec.write(directory / f"{name}-out")
            running, began = await submitted(path), time.monotonic()
            if kills:
                running = await _kill(pids, running, path, arguments, server)
            while await running.wait() != 0:
                running = await submitted(path)
            seconds = time.monotonic() - began
            begun = await _begun(cluster, name)
            calls = server.counts()["received"]
            return Outcome(read_results(path.parent / RESULTS), begun, seconds, calls)
    finally:
        server.stop()


def peer(directory: Path, arguments: argparse.Namespace) -> list[Line]:
    """Let inspect_ai do the same, killed in the middle and called again."""
    if why := peer_missing():
        return [Line("inspect_ai", why)]
    script = write_script(directory / "script.json", arguments.steps)
    server = RunningModelServer(model_server_arguments(script, latency_seconds=arguments.latency))
    driver, log = ROOT / "benchmarks" / "peer" / "inspect_driver.py", directory / "inspect.log"
    command = [str(PEER), str(driver), str(arguments.count), str(directory / "logs"), str(arguments.at_once)]
    env = os.environ | {"STUB_BASE_URL": f"{server.url}/v1", "STUB_API_KEY": "none"}
    needed, began = arguments.count * arguments.steps, time.monotonic()
    try:
        with log.open("wb") as out:
            first = subprocess.Popen(command, cwd=directory, env=env, stdout=out, stderr=out)
            while first.poll() is None and server.counts()["answered"] < needed // 2:
                time.sleep(LOOK_SECONDS)
            first.kill()
            first.wait()
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=PEER_LIMIT_SECONDS, cwd=directory, env=env
        )
        calls = server.counts()["received"]
    finally:
        server.stop()
    if done.returncode:
        return [Line("inspect_ai", f"it has failed: {done.stderr.strip().splitlines()[-1:]}")]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return [
        Line("inspect_ai, killed once: samples with a result", found["samples"], f"of {arguments.count:,}"),
        Line("inspect_ai, killed once: right", found["right"]),
        Line("inspect_ai, killed once: wall", round(time.monotonic() - began, 1), "s"),
        Line("inspect_ai, killed once: model calls more than needed", calls - needed),
    ]


async def _kill(
    pids: list[int],
    running: asyncio.subprocess.Process,
    path: Path,
    arguments: argparse.Namespace,
    server: RunningModelServer,
) -> asyncio.subprocess.Process:
    """Kill a share of the workers, of each role fewer than all, and the submitter in their midst."""
    chance = random.Random(arguments.seed)
    roles = [pids[: arguments.controllers], pids[arguments.controllers :]]
    spared = {chance.choice(role) for role in roles}
    victims = [pid for pid in pids if pid not in spared]
    chance.shuffle(victims)
    victims = victims[: round(arguments.killed * len(pids))]
    for number, pid in enumerate(victims):
        await _until_done((number + 1) / (len(victims) + 2), running, arguments, server)
        os.kill(pid, signal.SIGKILL)
        if number == len(victims) // 2 and running.returncode is None:
            running.kill()
            await running.wait()
            running = await submitted(path)
    return running


async def _until_done(
    share: float,
    running: asyncio.subprocess.Process,
    arguments: argparse.Namespace,
    server: RunningModelServer,
) -> None:
    """Wait until such a share of the work is done."""
    needed = share * arguments.count * arguments.steps
    while running.returncode is None and (await asyncio.to_thread(server.counts))["answered"] < needed:
        await asyncio.sleep(LOOK_SECONDS)


async def _begun(cluster: BenchCluster, name: str) -> int:
    number = 0
    async for page in ConversationQuery(cluster.client.store, Selection(labels={LABEL: name})).iterate_pages():
        number += len(page)
    return number


async def measure(directory: Path, arguments: argparse.Namespace) -> int:
    """Run both and compare them."""
    quiet = await run(directory, "undisturbed", arguments, kills=False)
    hurt = await run(directory, "killed", arguments, kills=True)
    known = sum(row.conversations for row in hurt.rows)
    doubled = len(hurt.rows) - len(hurt.scores) + max(0, hurt.conversations - known)
    is_same = quiet.scores == hurt.scores
    lines = [
        *quiet.lines("undisturbed", arguments.count, arguments.steps),
        *hurt.lines("killed", arguments.count, arguments.steps),
        Line("killed: attempts begun twice", doubled, "", 0),
        Line("scores that differ", sum(hurt.scores.get(key) != score for key, score in quiet.scores.items()), "", 0),
        *(() if arguments.no_peer or arguments.faults else await asyncio.to_thread(peer, directory, arguments)),
    ]
    number = round(arguments.killed * (arguments.controllers + arguments.tools))
    title = f"{arguments.count} attempts; SIGKILL for {number} workers and the submitter"
    show("eval_kills_faults" if arguments.faults else "eval_kills", title, lines)
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
    parser.add_argument("--no-peer", action="store_true")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(measure(Path(folder), parser.parse_args())))


if __name__ == "__main__":
    main()
