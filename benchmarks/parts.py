"""What each kind of process costs by itself: `python -m benchmarks.parts`.

Starts an idle cluster as `deckhands up` does, without a model and without conversations, and reads for each process
what it holds and uses. Then measures, in new processes, what each process and each command imports.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from benchmarks.machine import cpu_seconds, load
from broker.store.store import Store, open_store
from deckhands.cluster.embedded_cluster import Cluster, ClusterSpec

APPLICATIONS = {
    "controller": "controller_worker.app",
    "tools": "tool_worker.app",
    "workspace host": "tool_worker.host.server",
    "services": "deckhands.services, deckhands.ingress.app, deckhands.operations.jobs.app",
    "ingress": "deckhands.ingress.app",
    "jobs": "deckhands.operations.jobs.app",
    "beat": "deckhands.operations.jobs.beat",
    "server": "deckhands.server.application",
    "`deckhands --help`": "deckhands.cli.main",
} | {
    f"`deckhands {name}`": f"deckhands.cli.{module}"
    for name, module in (
        ("ls", "commands.listing"),
        ("show`, `logs", "commands.reading"),
        ("top", "tui.top"),
        ("why", "commands.why"),
        ("run", "commands.run"),
        ("submit", "commands.submit"),
        ("up", "commands.serve"),
        ("eval", "commands.eval"),
    )
}
"""What each process, and each group of commands, imports at its start."""
IMPORTING = """
import resource, time
import {modules}
print(time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
SETTLE_SECONDS = 20.0
"""How long a cluster runs before it counts as idle: its first jobs are done, and its models' clients are made."""
ROLES = {"ingresses": 1, "jobs": 1, "beats": 1}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parts", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the idle cluster is watched")
    parser.add_argument("--settle", type=float, default=SETTLE_SECONDS, help="how long it runs before")
    parser.add_argument("--rounds", type=int, default=5, help="how often each import is done; the median counts")
    options = parser.parse_args()
    print(f"load {load():.1f}\n")
    asyncio.run(_measure_idle(options.seconds, options.settle))
    print("\n| imports of | CPU, ms | resident, MiB |\n|---|---|---|")
    for name, modules in APPLICATIONS.items():
        rounds = [_measure_import(modules) for _ in range(options.rounds)]
        seconds, kibibytes = (statistics.median(each) for each in zip(*rounds, strict=True))
        print(f"| {name} | {seconds * 1000:.0f} | {kibibytes / 1024:.0f} |")


async def _measure_idle(seconds: float, settle_seconds: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        cluster = Cluster(ClusterSpec(Path(name), gives_up=False, **ROLES))
        await cluster.start()
        try:
            await cluster.until_ready()
            store = await open_store(cluster.url, deploys=False)
            await asyncio.sleep(settle_seconds)
            pids = {"store": cluster.store.child.pid}
            pids |= {name: worker.child.pid for name, worker in cluster.workers.items() if worker.child is not None}
            before, commands = {pid: cpu_seconds(pid) for pid in pids.values()}, await _count_commands(store)
            await asyncio.sleep(seconds)
            print("| process | CPU, ms a second | PSS, MiB | RSS, MiB | threads |\n|---|---|---|---|---|")
            rows = []
            for part, pid in pids.items():
                process = psutil.Process(pid)
                used, memory = (cpu_seconds(pid) - before[pid]) / seconds * 1000, process.memory_full_info()
                rows.append((used, memory.pss / 2**20, memory.rss / 2**20, float(process.num_threads())))
                print(f"| {part} | {_render(rows[-1])} |")
            print(f"| all | {_render(tuple(map(sum, zip(*rows, strict=True))))} |")
            print(f"\ncommands of the store a second: {(await _count_commands(store) - commands) / seconds:.0f}")
            await store.aclose()
        finally:
            await cluster.stop()


async def _count_commands(store: Store) -> int:
    """Return how many commands the store has run, with those that its functions called."""
    found = await store.call("INFO", "commandstats")
    return sum(int(calls) for calls in re.findall(rb"calls=(\d+)", found))


def _measure_import(modules: str) -> tuple[float, float]:
    """Return the CPU seconds and the KiB of a process that imports modules."""
    environment = {**os.environ, "DECKHANDS_URL": "unix:///nowhere", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [sys.executable, "-P", "-c", IMPORTING.format(modules=modules)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds, kibibytes = map(float, done.stdout.split())
    return seconds, kibibytes


def _render(row: tuple[float, ...]) -> str:
    used, pss, rss, threads = row
    return f"{used:.1f} | {pss:.0f} | {rss:.0f} | {threads:.0f}"


if __name__ == "__main__":
    main()
