"""What each kind of process costs by itself: `python -m benchmarks.parts`.

Starts an idle cluster as `deckhands up` does, without a model and with one conversation that is over, and reads for
each process what it holds and uses. Then measures how long commands that read take on it, how long `deckhands run`
takes until its first model call, and, in new processes, what each process and each command imports.
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
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.cluster import model_environment
from benchmarks.machine import addition_seconds, cpu_seconds, load
from broker.store.store import Store, open_store
from deckhands.client.client import Client
from deckhands.cluster.embedded_cluster import Cluster, ClusterSpec
from tests.webhook_parts import begin_worked

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
CONVERSATION = "read-by-commands"
READING = (
    ("--version",),
    ("ls",),
    ("show", CONVERSATION),
    ("logs", CONVERSATION),
    ("why", CONVERSATION),
    ("dead", "ls"),
    ("schedule", "ls"),
    ("budget", "ls"),
)
"""Commands that read, with their arguments."""
FIRST_CALL_LIMIT_SECONDS = 60.0
COMPILED = Path(__file__).parents[1] / "build" / "benchmarks" / "compiled"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parts", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the idle cluster is watched")
    parser.add_argument("--settle", type=float, default=SETTLE_SECONDS, help="how long it runs before")
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often each command and import is done; medians count"
    )
    options = parser.parse_args()
    print(f"load {load():.1f}; ten million additions take {addition_seconds():.2f} s\n")
    asyncio.run(_measure_cluster(options.seconds, options.settle, options.rounds))
    asyncio.run(_measure_first_call(options.rounds))
    print("\n| imports of | CPU, ms | resident, MiB |\n|---|---|---|")
    for name, modules in APPLICATIONS.items():
        rounds = [_measure_import(modules) for _ in range(options.rounds)]
        seconds, kibibytes = (statistics.median(each) for each in zip(*rounds, strict=True))
        print(f"| {name} | {seconds * 1000:.0f} | {kibibytes / 1024:.0f} |")


async def _measure_cluster(seconds: float, settle_seconds: float, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        cluster = Cluster(ClusterSpec(Path(name), gives_up=False, **ROLES))
        await cluster.start()
        try:
            await cluster.until_ready()
            store = await open_store(cluster.url, deploys=False)
            await begin_worked(Client(store), CONVERSATION)
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
            await asyncio.to_thread(_measure_reading, _environment(Path(name), DECKHANDS_URL=cluster.url), rounds)
        finally:
            await cluster.stop()


def _measure_reading(environment: Mapping[str, str], rounds: int) -> None:
    """Print how long commands take that read a cluster, beside an interpreter that does nothing."""
    programs = {"an interpreter": ("-c", "pass")}
    programs |= {f"`deckhands {' '.join(words)}`": ("-m", "deckhands", *words) for words in READING}
    print("\n| reading | wall, ms | CPU, ms |\n|---|---|---|")
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for number in range(rounds + 1):
        for name, words in programs.items():
            figure = _time_program(words, environment)
            if number:  # the first round warms the disk
                figures[name].append(figure)
    for name, found in figures.items():
        wall, used = (statistics.median(each) * 1000 for each in zip(*found, strict=True))
        print(f"| {name} | {wall:.0f} | {used:.0f} |")


def _time_program(words: Sequence[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Return the wall seconds and the CPU seconds of a program."""
    used, began = os.times(), time.monotonic()
    command = [sys.executable, "-P", *words]
    subprocess.run(command, env=dict(environment), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    wall, now = time.monotonic() - began, os.times()
    return wall, now.children_user + now.children_system - used.children_user - used.children_system


async def _measure_first_call(rounds: int) -> None:
    """Print how long `deckhands run` takes until it has sent its first request to a model server."""
    called: asyncio.Queue[float] = asyncio.Queue()

    async def note_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"POST ")  # a connection alone may have been opened before
            called.put_nowait(time.monotonic())
        writer.close()

    server = await asyncio.start_server(note_call, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    print("\n| `deckhands run` | first model call after, s | CPU of its processes until then, s |\n|---|---|---|")
    async with server:
        for backend in ("openai", "anthropic", "litellm"):
            found = [await _time_first_call(model_environment(backend, url), called) for _ in range(rounds + 1)]
            walls, used = zip(*found[1:], strict=True)  # the first one warms the disk
            shown = f"{statistics.median(walls):.2f} ({min(walls):.2f} to {max(walls):.2f})"
            print(f"| {backend} | {shown} | {statistics.median(used):.2f} |")


async def _time_first_call(model: Mapping[str, str], called: asyncio.Queue[float]) -> tuple[float, float]:
    """Return the wall seconds until the first model call, and the CPU seconds of all its processes until then."""
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as name:
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "deckhands", "run", "-t", "Say hello.", "-w", name, "--timeout", "60"),
            env=_environment(Path(home), **model),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wall = await asyncio.wait_for(called.get(), FIRST_CALL_LIMIT_SECONDS) - began
            started = psutil.Process(process.pid)
            return wall, sum(cpu_seconds(each.pid) for each in (started, *started.children(recursive=True)))
        finally:
            with suppress(ProcessLookupError):  # it has ended
                process.terminate()
            await process.wait()
            while not called.empty():  # a retry
                called.get_nowait()


def _environment(home: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a command. Compiled modules are kept, as an installed package has them."""
    ours = ("DECKHANDS_", "LLM_", "LITELLM_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PYTHONPYCACHEPREFIX": str(COMPILED), "DECKHANDS_HOME": str(home), **variables}


async def _count_commands(store: Store) -> int:
    """Return how many commands the store has run, with those that its functions called."""
    found = await store.call("INFO", "commandstats")
    return sum(int(calls) for calls in re.findall(rb"calls=(\d+)", found))


def _measure_import(modules: str) -> tuple[float, float]:
    """Return the CPU seconds and the KiB of a process that imports modules."""
    environment = _environment(Path("/nowhere"), DECKHANDS_URL="unix:///nowhere", LITELLM_LOCAL_MODEL_COST_MAP="True")
    command = [sys.executable, "-P", "-c", IMPORTING.format(modules=modules)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds, kibibytes = map(float, done.stdout.split())
    return seconds, kibibytes


def _render(row: tuple[float, ...]) -> str:
    used, pss, rss, threads = row
    return f"{used:.1f} | {pss:.0f} | {rss:.0f} | {threads:.0f}"


if __name__ == "__main__":
    main()
