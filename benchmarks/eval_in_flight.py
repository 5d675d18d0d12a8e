"""Attempts of an evaluation in flight on one machine: `python -m benchmarks.eval_in_flight --count 2000`.

Each attempt asks the local model server, whose replies take log-normal times around `--latency` seconds, and has the
no-op tool in between. Ideal is how long the server's replies alone would take with as many attempts at once. Memory is
what controllers and submitter hold at the most beyond what they hold after one conversation. How late loops are is
sampled: twenty times a second in the submitter, once a second in a controller.

With `--count 500 --at-once 250 --latency 20 --sigma 0.2` attempts take a minute and more, and the share of the wall
that is not the model's is what scheduling costs. `--model-inside` leaves the server out: the script runs inside the
controllers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cluster import (
    READY_LIMIT_SECONDS,
    ROOT,
    BenchCluster,
    model_environment,
    model_server_arguments,
    running_cluster,
)
from benchmarks.eval_figures import Line, ideal_seconds, percentile, show
from benchmarks.machine import cpu_seconds, peak_kib, resident_kib
from benchmarks.submitter import ANSWER, RESULTS, USED, Spec
from deckhands.evaluation.attempts.results import read_results
from deckhands.operations.monitoring.census import read_workers
from tests.model_server.latency import Latency
from tests.model_server.running_server import RunningModelServer

SIGMA = 0.5
WATCH_SECONDS = 0.4
"""Less than half a heartbeat: each of them is seen."""
OPEN_FILES = 20_000


def write_script(path: Path, steps: int) -> Path:
    """Write a script of so many model calls, whose answer is right."""
    turns: list[dict[str, object]] = [
        {"tool_calls": [{"name": "execute_bash", "arguments": {"command": f"true {number}"}}]}
        for number in range(steps - 1)
    ]
    finish = {"name": "finish", "arguments": {"message": f"FINAL ANSWER: {ANSWER}"}}
    path.write_text(json.dumps({"turns": [*turns, {"tool_calls": [finish]}]}))
    return path


def write_scripts(folder: Path, count: int, steps: int, latency: Latency) -> None:
    """Write a script for each attempt whose turns take as long as the replies of the server would."""
    folder.mkdir(parents=True)
    for number in range(count):
        script = json.loads(write_script(folder / f"i{number}.json", steps).read_text())
        for at, turn in enumerate(script["turns"]):
            turn["latency_seconds"] = latency.of(f"i{number}", at)
        (folder / f"i{number}.json").write_text(json.dumps(script))


async def submitted(path: Path) -> asyncio.subprocess.Process:
    """Start the submitter."""
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.submitter", str(path), cwd=ROOT)


@dataclass(slots=True)
class Watched:
    """What the controllers say of themselves meanwhile.

    Attributes:
        lags: by how many seconds each of their loops was late, one value of each second.
        held: the most conversations that they had at once.
    """

    lags: list[float] = field(default_factory=list)
    held: int = 0


async def measure(directory: Path, arguments: argparse.Namespace) -> int:
    """Run once and print what was found; 1 if an attempt is missing or has failed."""
    latency = Latency(arguments.latency, arguments.sigma)
    script = write_script(directory / "script.json", arguments.steps)
    if arguments.model_inside:
        write_scripts(directory / "scripts", arguments.count, arguments.steps, latency)
        return await _measured(directory, arguments, {}, "scripted")
    options = (*model_server_arguments(script, latency_seconds=arguments.latency), "--latency-sigma")
    server = RunningModelServer((*options, str(arguments.sigma)))
    try:
        environment = model_environment("openai", server.url)
        return await _measured(directory, arguments, environment, environment["LLM_MODEL"])
    finally:
        server.stop()


async def _measured(directory: Path, arguments: argparse.Namespace, environment: dict[str, str], model: str) -> int:
    count, at_once = arguments.count, arguments.at_once or arguments.count
    latency, turns = Latency(arguments.latency, arguments.sigma), range(arguments.steps)
    takes = [sum(latency.of(f"i{number}", turn) or 0.0 for turn in turns) for number in range(count)]
    ideal = ideal_seconds(takes, at_once)
    async with running_cluster(directory / "cluster") as cluster:
        held = str(-(-at_once // arguments.controllers) + 10)
        settings = {**environment, "DECKHANDS_MAX_CONVERSATIONS": held}
        pids = [await cluster.start_controller(**settings) for _ in range(arguments.controllers)]
        tool, store = await cluster.start_noop_tool(), await cluster.store_pid()
        for _ in pids:  # the client of the model is loaded at its first use
            warm = f"scripted/{directory / 'script.json'}" if arguments.model_inside else model
            limit = READY_LIMIT_SECONDS + 2 * arguments.latency
            await cluster.until_stepping(await cluster.submit(model=warm), limit_seconds=limit)
        base = {pid: resident_kib(pid) for pid in (*pids, store)}
        before = {pid: cpu_seconds(pid) for pid in (*pids, tool, store)}
        spec = Spec(
            cluster.store.url,
            "in-flight",
            count,
            at_once,
            model,
            scripts=str(directory / "scripts") if arguments.model_inside else "",
            is_paced=arguments.paced,
        )
        running = await submitted(spec.write(directory / "out"))
        watched = await _watch(cluster, running)
        cpu = {pid: cpu_seconds(pid) - spent for pid, spent in before.items()}
        peaks = {pid: peak_kib(pid) - base[pid] for pid in (*pids, store)}
    used = json.loads((directory / "out" / USED).read_text())
    rows = read_results(directory / "out" / RESULTS)
    failures = [code for row in rows for code in row.failures]
    steps = max(1, sum(row.iterations for row in rows))
    most = max(1, used["most_in_flight"])
    controllers, own = sum(peaks[pid] for pid in pids) / most, (used["peak_kib"] - used["base_kib"]) / most
    by_step = 1_000 / steps
    lines = [
        Line("attempts with a result", len(rows), f"of {count:,}"),
        Line("attempts under way at the most", used["most_in_flight"]),
        Line("conversations that controllers held at the most", watched.held),
        Line("wall ÷ ideal", round(used["seconds"] / max(ideal, 0.001), 3), f"ideal {ideal:.1f} s", 1.1),
        Line("share of the wall that is not the model's", round(100 * (1 - ideal / used["seconds"]), 2), "%"),
        Line("memory in flight, controllers and submitter", round(controllers + own, 1), "KiB each", 100),
        Line("  controllers", round(controllers, 1), "KiB each"),
        Line("  submitter", round(own, 1), "KiB each"),
        Line("memory of the store, which holds the logs", round(peaks[store] / most, 1), "KiB each"),
        Line("loop of controllers late, p99", round(1_000 * percentile(watched.lags, 0.99)), "ms", 50),
        Line("loop of the submitter late, p99", round(1_000 * used["lag_p99"]), "ms", 50),
        Line("CPU by step: controllers", round(by_step * sum(cpu[pid] for pid in pids), 2), "ms"),
        Line("CPU by step: store", round(by_step * cpu[store], 2), "ms"),
        Line("CPU by step: submitter", round(by_step * used["cpu"], 2), "ms"),
        Line("self-made time-outs", sum("timeout" in code for code in failures), "", 0),
        Line("infrastructure failures", len(failures), " ".join(sorted(set(failures))), 0),
        Line("bound by", "; ".join(used["bounds"])),
    ]
    show(arguments.write_as, f"{count:,} attempts, {at_once:,} at once, {steps:,} steps", lines)
    return 0 if len(rows) == count and not failures else 1


async def _watch(cluster: BenchCluster, running: asyncio.subprocess.Process) -> Watched:
    """Wait for the submitter, and return what the controllers say meanwhile."""
    found, known = Watched(), dict[str, float]()
    while running.returncode is None:
        held = 0
        for worker in await read_workers(cluster.client.store):
            if worker.role != "controller":
                continue
            held += int(worker.figures.get("conversations", {}).get("", 0.0))
            late = worker.figures.get("loop_late_seconds", {}).get("", 0.0)
            if late != known.setdefault(worker.name, late):
                found.lags.append(late - known[worker.name])
                known[worker.name] = late
        found.held = max(found.held, held)
        try:
            await asyncio.wait_for(running.wait(), WATCH_SECONDS)
        except TimeoutError:
            continue
    assert running.returncode == 0, "the submitter has failed"
    return found


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eval_in_flight", description=__doc__)
    parser.add_argument("--count", type=int, default=2_000)
    parser.add_argument("--steps", type=int, default=4, help="model calls of an attempt")
    parser.add_argument("--latency", type=float, default=15.0, help="median seconds of a model call")
    parser.add_argument("--sigma", type=float, default=SIGMA, help="of the logarithm of a latency; 0: all take as long")
    parser.add_argument("--at-once", type=int, default=0, help="0: all")
    parser.add_argument("--paced", action="store_true", help="grow from few, and by what hosts say")
    parser.add_argument("--controllers", type=int, default=1)
    parser.add_argument("--model-inside", action="store_true", help="the script runs inside the controllers")
    parser.add_argument("--write-as", default="eval_in_flight", metavar="NAME", help="the name of the file written")
    limit = min(OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(measure(Path(folder), parser.parse_args())))


if __name__ == "__main__":
    main()
