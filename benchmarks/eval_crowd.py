"""The same samples evaluated by Deckhands and by inspect_ai: `python -m benchmarks.eval_crowd --count 200`.

Both ask the same stub server, whose replies take `--latency` seconds; each sample takes `--steps` model calls, with a
tool that does nothing in between. Printed for each: wall divided by ideal, CPU of a step, and memory. Deckhands' CPU is
that of all its processes: controller, tool worker, store and submitter. `--no-peer` leaves inspect_ai out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cluster import ROOT, model_environment, model_server_arguments, running_cluster
from benchmarks.eval_figures import Line, show
from benchmarks.eval_in_flight import submitted, write_script
from benchmarks.machine import cpu_seconds, peak_kib
from benchmarks.submitter import RESULTS, USED, Spec
from deckhands.evaluation.attempts.results import read_results
from tests.model_server.running_server import RunningModelServer

PEER = ROOT / "build" / "inspect-venv" / "bin" / "python"
PEER_LIMIT_SECONDS = 900.0
MIB = 1_024


async def ours(directory: Path, url: str, count: int) -> dict[str, Any]:
    """Evaluate the samples with Deckhands."""
    async with running_cluster(directory / "cluster") as cluster:
        environment = model_environment("openai", url)
        controller = await cluster.start_controller(**environment)
        tool, store = await cluster.start_noop_tool(), await cluster.store_pid()
        pids = (controller, tool, store)
        before = sum(map(cpu_seconds, pids))
        spec = Spec(cluster.store.url, "crowd", count, count, environment["LLM_MODEL"])
        running = await submitted(spec.write(directory / "out"))
        assert await running.wait() == 0, "the submitter has failed"
        used = json.loads((directory / "out" / USED).read_text())
        rows = read_results(directory / "out" / RESULTS)
        return {
            "seconds": used["seconds"],
            "cpu": sum(map(cpu_seconds, pids)) - before + used["cpu"],
            "peak_kib": sum(map(peak_kib, pids)) + used["peak_kib"],
            "steps": sum(row.iterations for row in rows),
            "right": sum(row.outcome == "resolved" for row in rows),
            "failures": sum(len(row.failures) for row in rows),
        }


def peer_missing() -> str:
    """Install inspect_ai if need be, and return why that is not possible; empty: it is there."""
    try:
        subprocess.run([ROOT / "benchmarks" / "peer" / "inspect.sh"], check=True, timeout=PEER_LIMIT_SECONDS)
    except (subprocess.SubprocessError, OSError) as error:
        return f"it cannot be installed ({error})"
    return ""


def theirs(directory: Path, url: str, count: int) -> dict[str, Any] | str:
    """Evaluate the samples with inspect_ai; a text: why that is not possible."""
    if why := peer_missing():
        return why
    driver = ROOT / "benchmarks" / "peer" / "inspect_driver.py"
    command = [str(PEER), str(driver), str(count), str(directory / "logs")]
    env = os.environ | {"STUB_BASE_URL": f"{url}/v1", "STUB_API_KEY": "none"}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=PEER_LIMIT_SECONDS, cwd=directory, env=env
    )
    if done.returncode:
        return f"it has failed: {done.stderr.strip().splitlines()[-1:]}"
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def lines_of(name: str, found: dict[str, Any], ideal: float, *, most: float | None = None) -> list[Line]:
    """Return what one of them has used."""
    return [
        Line(f"{name}: right", found["right"]),
        Line(f"{name}: wall ÷ ideal", round(found["seconds"] / ideal, 3), f"{found['seconds']:.1f} s", most),
        Line(f"{name}: CPU by step", round(1_000 * found["cpu"] / found["steps"], 1), "ms"),
        Line(f"{name}: memory at the most", round(found["peak_kib"] / MIB), "MiB"),
    ]


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eval_crowd", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--latency", type=float, default=1.0)
    parser.add_argument("--no-peer", action="store_true")
    arguments = parser.parse_args()
    ideal = arguments.steps * arguments.latency
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        script = write_script(directory / "script.json", arguments.steps)
        server = RunningModelServer(model_server_arguments(script, latency_seconds=arguments.latency))
        try:
            found = asyncio.run(ours(directory, server.url, arguments.count))
            peer = "left out" if arguments.no_peer else theirs(directory, server.url, arguments.count)
        finally:
            server.stop()
    lines = lines_of("Deckhands", found, ideal, most=1.1)
    if isinstance(peer, str):
        lines.append(Line("inspect_ai", peer))
    else:
        lines += lines_of(f"inspect_ai {peer['version']}", peer, ideal)
    show("eval_crowd", f"{arguments.count} samples of {arguments.steps} steps, {arguments.latency:g} s each", lines)
    sys.exit(0 if found["right"] == arguments.count and not found["failures"] else 1)


if __name__ == "__main__":
    main()
