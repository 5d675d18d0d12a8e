"""What `deckhands top` needs with a long list: CPU of its process, and how soon it shows what happens.

It runs on a pseudo-terminal of 120 columns and 40 lines. A change is timed from before the append is sent until the
terminal has been sent the new title, which only the first row has.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import random
import struct
import sys
import termios
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from benchmarks.bench import Bench
from benchmarks.cluster import BenchCluster, running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.gateway import begin_many
from benchmarks.machine import cpu_seconds
from broker.contract.actions import MessageAction
from broker.contract.events import EventSource

LIMIT_SECONDS = 60.0
SETTLING_SECONDS = 3.0
CPU_TARGET_PERCENT = 5.0
CHANGE_TARGET_MS = 1_500.0
APPENDS_A_SECOND = 20.0
ROWS, COLUMNS = 40, 120


@dataclass
class Looking:
    """The command on its terminal; `sent` is what it has sent since it was looked at last."""

    pid: int
    fd: int
    sent: bytearray = field(default_factory=bytearray)
    total: int = 0

    def read(self) -> None:
        """Take in what it has sent."""
        with suppress(OSError):
            piece = os.read(self.fd, 65_536)
            self.sent += piece
            self.total += len(piece)

    async def until(self, text: bytes) -> float:
        """Wait until it has sent a text, and return when that was."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while text not in self.sent:
                await asyncio.sleep(0.005)
        return time.perf_counter()


@asynccontextmanager
async def looking(cluster: BenchCluster, url: str) -> AsyncIterator[Looking]:
    """Start `deckhands top` and read what it draws."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {name: text for name, text in os.environ.items() if not name.startswith(("DECKHANDS_", "LLM_", "NO_COLOR"))}
    env |= {"DECKHANDS_URL": url, "TERM": "xterm-256color", "DECKHANDS_HOME": str(cluster.directory)}
    command = (sys.executable, "-P", "-m", "deckhands", "top", "--sort", "updated")
    running = await asyncio.create_subprocess_exec(*command, stdin=its, stdout=its, stderr=its, env=env)
    os.close(its)
    os.set_blocking(ours, False)
    found, loop = Looking(running.pid, ours), asyncio.get_running_loop()
    loop.add_reader(ours, found.read)
    try:
        yield found
    finally:
        loop.remove_reader(ours)
        running.kill()
        await running.wait()
        os.close(ours)


async def measure(bench: Bench) -> Result:
    """Let it look at many conversations: first nothing happens, then some of them get messages."""
    count = bench.choose(smoke=200, short=10_000, full=10_000)
    seconds = bench.choose(smoke=3, short=20, full=60)
    rounds = bench.choose(smoke=2, short=10, full=30)
    async with running_cluster(bench.directory / "top") as cluster:
        names = await begin_many(cluster, count)
        began = time.perf_counter()
        async with looking(cluster, cluster.store.url) as seen:
            await seen.until(f"Conversations: {count:,}".encode())
            loading, loading_cpu = time.perf_counter() - began, cpu_seconds(seen.pid)
            await asyncio.sleep(SETTLING_SECONDS)
            quiet = await _share(seen, seconds)
            adding = asyncio.create_task(_append(cluster, names))
            busy = await _share(seen, seconds)
            adding.cancel()
            await asyncio.gather(adding, return_exceptions=True)
            delays = [await _new_one(cluster, seen, number) for number in range(rounds)]
            drawn = seen.total
    figures = [
        Figure("CPU, nothing happens", "% of a core", Spread.of([quiet], scale=100), CPU_TARGET_PERCENT),
        Figure("CPU, 20 messages a second", "% of a core", Spread.of([busy], scale=100), CPU_TARGET_PERCENT),
        Figure("a new conversation is on the screen", "ms", Spread.of(delays, scale=1_000), CHANGE_TARGET_MS),
        Figure("the first full list", "s", Spread.of([loading])),
    ]
    note = (
        f"{count:,} conversations in a list of {ROWS} lines, {seconds} s each; until the list was whole, it took "
        f"{loading_cpu:.1f} s of CPU. It has drawn {drawn / 2**20:.1f} MiB."
    )
    return Result("`deckhands top`", figures, note)


async def _share(seen: Looking, seconds: float) -> float:
    began, cpu = time.perf_counter(), cpu_seconds(seen.pid)
    await asyncio.sleep(seconds)
    seen.sent.clear()
    return (cpu_seconds(seen.pid) - cpu) / (time.perf_counter() - began)


async def _append(cluster: BenchCluster, names: list[str]) -> None:
    chosen = random.Random(1)
    while True:
        event = MessageAction(content="And this.", source=EventSource.USER)
        await cluster.client.log.append(chosen.choice(names), [event])
        await asyncio.sleep(1 / APPENDS_A_SECOND)


async def _new_one(cluster: BenchCluster, seen: Looking, number: int) -> float:
    """Begin a conversation and return how long it took until its title was drawn."""
    title = f"new-{number:04}"
    began = time.perf_counter()
    await cluster.client.submit("Do it.", title=title)
    found = await seen.until(title.encode())
    seen.sent.clear()
    return found - began
