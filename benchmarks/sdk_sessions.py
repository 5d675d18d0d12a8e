"""What a program of the Claude Agent SDK costs: `python -m benchmarks.sdk_sessions --sessions 4 --steps 20`.

Each program is started as a controller worker starts it, sandbox included, and is driven through turns of two tool
calls that are answered at once. Memory is the proportional share (PSS) of all its processes, so that what several share
counts once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import psutil

from broker.contract.specs import AgentSpec
from controller_worker.agents.registry import create_agent
from controller_worker.loop.sdk.runner import PROGRAM, Line, SdkRunner, can_sandbox
from controller_worker.loop.sdk.session import MODEL

LIMIT_SECONDS = 120.0
MIB = 2**20


class Driven:
    """One program, and what it says."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[Line] = asyncio.Queue()
        self.endings: set[asyncio.Task[None]] = set()
        self.runner = SdkRunner(
            on_line=self.lines.put_nowait,
            on_end=lambda said: self.lines.put_nowait({"end": said}),
            endings=self.endings,
        )

    async def start(self) -> float:
        """Start it and return the seconds until it asks."""
        begun = time.perf_counter()
        await self.runner.start(PROGRAM, is_sandboxed=can_sandbox())
        tools = [
            {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
            for tool in create_agent(AgentSpec()).tools
        ]
        self.runner.send(begin={"token": "benchmark", "tools": tools, "model": MODEL})
        self.runner.send(query="Message 2: begin")
        await self._until("asks")
        return time.perf_counter() - begun

    async def step(self, number: int) -> float:
        """Take one turn of two calls and return its seconds."""
        begun = time.perf_counter()
        calls = [
            {"id": f"toolu_{number}_{place}", "name": "execute_bash", "input": {"command": "ls"}} for place in (0, 1)
        ]
        self.runner.send(reply={"id": f"msg_{number}", "model": MODEL, "text": "next", "calls": calls})
        for call in calls:
            self.runner.send(result={"id": call["id"], "text": "a.txt", "is_error": False})
        await self._until("asks")
        return time.perf_counter() - begun

    def processes(self) -> Iterator[psutil.Process]:
        """Yield its processes."""
        assert self.runner.pid is not None
        yield (own := psutil.Process(self.runner.pid))
        yield from own.children(recursive=True)

    def pss_bytes(self) -> int:
        """Return the memory of all its processes, shared pages divided among those that share them."""
        return sum(found.memory_full_info().pss for found in self.processes())

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all its processes."""
        return sum(times.user + times.system for found in self.processes() if (times := found.cpu_times()))

    async def stop(self) -> None:
        """End it."""
        self.runner.stop()
        while self.endings:
            await asyncio.wait(self.endings)

    async def _until(self, word: str) -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            while word not in (line := await self.lines.get()):
                if "failed" in line or "end" in line:
                    raise SystemExit(f"the program has ended: {line}")


async def _measure(sessions: int, steps: int) -> None:
    alone = Driven()
    start = await alone.start()
    started_cpu = alone.cpu_seconds()
    taken = [await alone.step(number) for number in range(1, steps + 1)]
    step_cpu = (alone.cpu_seconds() - started_cpu) / steps
    row("start of one, until it asks", "s", start)
    row("CPU of a start", "s", started_cpu)
    row("a step with two tool calls, median", "ms", statistics.median(taken) * 1e3)
    row("CPU of a step", "ms", step_cpu * 1e3)
    row("memory of one", "MiB", alone.pss_bytes() / MIB)
    others = [Driven() for _ in range(sessions - 1)]
    begun = time.perf_counter()
    for other in others:
        await other.start()
    everybody = [alone, *others]
    total = sum(one.pss_bytes() for one in everybody) / MIB
    row(f"memory of each of {sessions}", "MiB", total / sessions)
    if others:
        row("start of each of the others", "s", (time.perf_counter() - begun) / len(others))
    free = psutil.virtual_memory().available / MIB + total
    row("programs that fit into the memory of this machine", "", free / (total / sessions))
    for one in everybody:
        await one.stop()


def row(name: str, unit: str, value: Any) -> None:
    """Print one line of the table."""
    print(f"| {name:50} | {unit:4} | {value:10.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a program of the Claude Agent SDK costs.")
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    if find_spec("claude_agent_sdk") is None:
        print("sdk_sessions: the Claude Agent SDK is not installed (deckhands[claude])")
        return
    print(f"\n| {'A program of the Claude Agent SDK':50} | unit | {'Deckhands':>10} |\n|{'-' * 52}|------|{'-' * 12}|")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_measure(arguments.sessions, arguments.steps))


if __name__ == "__main__":
    main()
