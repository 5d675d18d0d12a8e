"""Attempts with real bash workspaces on one node: `python -m benchmarks.eval_workspaces --count 300`.

Each attempt has a workspace with a shell in a sandbox, where it runs `--steps` commands that leave a file; a check
scores that file in a fresh workspace. The model is the local model server. Printed: wall divided by ideal, memory that
the machine has less while all workspaces are open, CPU of a step, and what the infrastructure has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

import psutil

from benchmarks.cluster import model_environment, model_server_arguments, running_cluster
from benchmarks.eval_figures import Line, show
from benchmarks.eval_in_flight import submitted
from benchmarks.machine import cpu_seconds, peak_kib
from benchmarks.submitter import RESULTS, USED, Spec
from deckhands.evaluation.attempts.results import read_results
from tests.model_server.running_server import RunningModelServer

LOOK_SECONDS = 0.5


def write_script(path: Path, steps: int) -> Path:
    """Write a script that adds a line to a file with each of so many commands."""
    turns: list[dict[str, object]] = [
        {"tool_calls": [{"name": "execute_bash", "arguments": {"command": f"echo {number} >> lines.txt; pwd"}}]}
        for number in range(steps)
    ]
    finish = {"name": "finish", "arguments": {"message": "done"}}
    path.write_text(json.dumps({"turns": [*turns, {"tool_calls": [finish]}]}))
    return path


async def measure(directory: Path, arguments: argparse.Namespace) -> int:
    """Run once and print what was found; 1 if an attempt is missing, wrong or has failed."""
    count, at_once, steps = arguments.count, arguments.at_once or arguments.count, arguments.steps
    script = write_script(directory / "script.json", steps)
    server = RunningModelServer(model_server_arguments(script, latency_seconds=arguments.latency))
    try:
        async with running_cluster(directory / "cluster") as cluster:
            environment = model_environment("openai", server.url)
            controller = await cluster.start_controller(**environment)
            tools = [await cluster.start_tools(DECKHANDS_SANDBOX=arguments.sandbox) for _ in range(arguments.tools)]
            pids = (controller, *tools, await cluster.store_pid())
            before, free = sum(map(cpu_seconds, pids)), psutil.virtual_memory().available
            check = f"test $(wc -l < lines.txt) -eq {steps}"
            model = environment["LLM_MODEL"]
            spec = Spec(cluster.store.url, "workspaces", count, at_once, model, pool=None, check=check)
            running = await submitted(spec.write(directory / "out"))
            least, shells = await _watch(running)
            cpu = sum(map(cpu_seconds, pids)) - before
            tool_peak = sum(map(peak_kib, tools))
    finally:
        server.stop()
    rows = read_results(directory / "out" / RESULTS)
    used = json.loads((directory / "out" / USED).read_text())
    failures = [code for row in rows for code in row.failures]
    right = sum(row.outcome == "resolved" for row in rows)
    ideal = -(-count // at_once) * (steps + 1) * arguments.latency
    lines = [
        Line("attempts with a result", len(rows), f"of {count:,}"),
        Line("resolved, by a check in a fresh workspace", right),
        Line("attempts under way at the most", used["most_in_flight"]),
        Line("workspaces with a shell at the most", shells),
        Line("wall ÷ model latency alone", round(used["seconds"] / ideal, 2), f"wall {used['seconds']:.0f} s"),
        Line("memory the machine had less, each attempt under way", round((free - least) / 2**20 / at_once, 2), "MiB"),
        Line("memory of the tool workers", round(tool_peak / 1024), "MiB"),
        Line("CPU by step: controller, tool workers, store", round(1_000 * cpu / count / (steps + 1), 1), "ms"),
        Line("infrastructure failures", len(failures), " ".join(sorted(set(failures))), 0),
    ]
    show("eval_workspaces", f"{count:,} attempts with bash workspaces, {at_once:,} at once", lines)
    return 0 if right == len(rows) == count and not failures else 1


async def _watch(running: asyncio.subprocess.Process) -> tuple[int, int]:
    """Wait for the submitter; return the least memory that was available, and how many shells there were at most."""
    least, most = psutil.virtual_memory().available, 0
    while running.returncode is None:
        least = min(least, psutil.virtual_memory().available)
        most = max(most, sum(map(_is_host, psutil.pids())))
        try:
            await asyncio.wait_for(running.wait(), LOOK_SECONDS)
        except TimeoutError:
            continue
    assert running.returncode == 0, "the submitter has failed"
    return least, most


def _is_host(pid: int) -> bool:
    """Say whether a process is the host of a workspace, which has one shell."""
    try:
        program, *arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b"python" in program and any(one.endswith(b"tool_worker/host/__main__.py") for one in arguments)
    except OSError:
        return False


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eval_workspaces", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--steps", type=int, default=4, help="commands of an attempt")
    parser.add_argument("--latency", type=float, default=5.0, help="seconds of a model call")
    parser.add_argument("--at-once", type=int, default=0, help="0: all")
    parser.add_argument("--tools", type=int, default=1, help="tool workers")
    parser.add_argument("--sandbox", default="auto")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(measure(Path(folder), parser.parse_args())))


if __name__ == "__main__":
    main()
