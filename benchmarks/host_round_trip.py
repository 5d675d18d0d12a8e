"""How fast and how small a workspace host is: round trips of commands, start, memory.

    python benchmarks/host_round_trip.py [--sandbox bwrap|none] [--rounds 500] [--hosts 20]

Prints medians and 95th percentiles as one JSON object. A round trip is seen from the tool worker: request, journal,
shell, journal, answer. A start is `Workspaces.open` of a new conversation, until its host has answered; its CPU is that
of the sandbox, the host, its shell and ourselves. Both swing with the machine, so a bare interpreter is started after
each of them for comparison: a host cannot start faster than that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter

import psutil

from tool_worker.sandbox.sandbox import find_interpreter
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.workspaces import Workspaces

COMMANDS = {"true": "true", "echo hi": "echo hi", "one program": "/bin/true"}


async def milliseconds(call: Callable[[], Awaitable[object]]) -> float:
    began = perf_counter()
    await call()
    return (perf_counter() - began) * 1000


def summary(samples: list[float]) -> dict[str, float]:
    ranked = sorted(samples)
    return {"p50_ms": round(statistics.median(ranked), 3), "p95_ms": round(ranked[int(len(ranked) * 0.95)], 3)}


def cpu_milliseconds(root: Path, name: str) -> float:
    """Return the CPU of a workspace's processes so far."""
    host = psutil.Process(HostFolder(root, name).read_main_pid())
    found = [host, *host.children(recursive=True), *([outer] if (outer := host.parent()).name() == "bwrap" else [])]
    return sum(int(Path(f"/proc/{one.pid}/schedstat").read_text().split()[0]) for one in found) / 1e6


async def bare_interpreter() -> None:
    await (await asyncio.create_subprocess_exec(find_interpreter(), "-I", "-S", "-c", "pass")).wait()


async def measure(root: Path, sandbox: str, rounds: int, hosts: int) -> dict[str, object]:
    workspaces = Workspaces(root, sandbox=sandbox)
    host = await workspaces.open("warm-up")
    report: dict[str, object] = {"sandbox": sandbox}
    action_id = 0

    async def run(command: str) -> None:
        nonlocal action_id
        action_id += 1
        await host.run(action_id, "bash", {"command": command})

    try:
        for name, command in COMMANDS.items():
            report[name] = summary([await milliseconds(lambda text=command: run(text)) for _ in range(rounds)])
        names = [f"conversation-{number}" for number in range(hosts)]
        starts, bare, own = [], [], 0.0
        for name in names:
            own -= time.process_time()
            starts.append(await milliseconds(lambda name=name: workspaces.open(name)))
            own += time.process_time()
            bare.append(await milliseconds(bare_interpreter))
        own_ms = own * 1000 / hosts
        report["start"], report["start of a bare interpreter"] = summary(starts), summary(bare)
        report["start_cpu_ms"] = round(own_ms + statistics.median(cpu_milliseconds(root, name) for name in names), 1)
        memory = [psutil.Process(HostFolder(root, name).read_main_pid()).memory_full_info() for name in names]
        report["rss_mb"] = round(statistics.median(one.rss for one in memory) / 2**20, 1)
        report["private_mb"] = round(statistics.median(one.uss for one in memory) / 2**20, 1)
        report["close"] = summary([await milliseconds(lambda name=name: workspaces.close(name)) for name in names])
    finally:
        for state in workspaces.list():
            await workspaces.close(state.conversation_id)
        await workspaces.aclose()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sandbox", choices=["bwrap", "none"], default="bwrap")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--hosts", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        report = asyncio.run(measure(Path(root), options.sandbox, options.rounds, options.hosts))
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
