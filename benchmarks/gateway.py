"""What one gateway process carries: open streams that each follow a conversation, and pages of a long list.

A delivery is timed from before the append is sent until the event has been read from the reader's socket. Reader and
appender are this process, so what it needs itself is in the time, and not in the CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import httpx2

from benchmarks.bench import Bench
from benchmarks.cluster import BenchCluster, free_port, running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.machine import cpu_seconds, resident_kib
from broker.contract.actions import MessageAction
from broker.contract.events import ConversationCreated, EventSource
from broker.contract.specs import Tenancy
from broker.log.append_call import Appended
from deckhands.server.auth.api_keys import ApiKeys, Scope
from deckhands.server.serving import raise_file_limit

DELIVERY_TARGET_MS = 100.0
PAGE_TARGET_MS = 100.0
APPENDS_A_SECOND = 100.0
OPENED_AT_ONCE = 100
BEGUN_AT_ONCE = 64
LIMIT_SECONDS = 300.0
SETTLING_SECONDS = 2.0
TENANTS = 4
PAGES = (50, 500)


@dataclass
class Crowd:
    """Readers of one gateway.

    Attributes:
        seen: the last event of each conversation that has arrived.
        arrived: when each event of each conversation has arrived.
    """

    port: int
    key: str
    seen: dict[str, int] = field(default_factory=dict)
    arrived: dict[tuple[str, int], float] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def open(self, conversation_ids: Sequence[str]) -> None:
        """Open a stream for each conversation, and wait until each has its first two events."""
        for start in range(0, len(conversation_ids), OPENED_AT_ONCE):
            some = conversation_ids[start : start + OPENED_AT_ONCE]
            self._tasks += [asyncio.create_task(self._read(name)) for name in some]
            await self.until(dict.fromkeys(some, 2))

    async def until(self, wanted: dict[str, int]) -> None:
        """Wait until so many events of conversations have arrived."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while any(self.seen.get(name, 0) < last for name, last in wanted.items()):
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Close all streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, name: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"Host: localhost\r\nAuthorization: Bearer {self.key}\r\n"
        writer.write(f"GET /conversations/{name}/stream HTTP/1.1\r\n{head}\r\n".encode())
        try:
            while line := await reader.readline():
                if line.startswith(b"id: "):
                    self.seen[name] = int(line[4:])
                    self.arrived[name, self.seen[name]] = time.perf_counter()
            raise AssertionError(f"the stream of {name} has ended")
        finally:
            writer.close()


async def measure_streams(bench: Bench) -> Result:
    """Open streams, let them be quiet, and append to random ones."""
    count = bench.choose(smoke=50, short=2_000, full=2_000)
    seconds = bench.choose(smoke=2, short=20, full=60)
    raise_file_limit()
    async with running_cluster(bench.directory / "streams") as cluster, gateway_of(cluster) as (port, pid, key):
        names = await begin_many(cluster, count)
        warm = Crowd(port, key)
        await warm.open(names[:OPENED_AT_ONCE])
        await warm.close()
        await asyncio.sleep(SETTLING_SECONDS)
        empty = resident_kib(pid)
        crowd = Crowd(port, key)
        began, cpu = time.perf_counter(), cpu_seconds(pid)
        await crowd.open(names)
        opening, opening_cpu = time.perf_counter() - began, cpu_seconds(pid) - cpu
        await asyncio.sleep(SETTLING_SECONDS)
        full = resident_kib(pid)
        quiet = await _cpu_share(pid, seconds)
        delays, busy = await _deliver(cluster, crowd, names, pid, seconds)
        after = resident_kib(pid)
        await crowd.close()
    ranked = sorted(delays)
    per_event = max(0.0, busy - quiet) * seconds / len(ranked)
    figures = [
        Figure("memory of a stream", "KiB", Spread.of([(full - empty) / count])),
        Figure("the same, after the deliveries", "KiB", Spread.of([(after - empty) / count])),
        Figure("CPU to open a stream", "ms", Spread.of([opening_cpu / count], scale=1_000)),
        Figure("CPU of a quiet stream", "µs/s", Spread.of([quiet / count], scale=1e6)),
        Figure("CPU of a delivery", "ms", Spread.of([per_event], scale=1_000)),
        Figure("delivery, median", "ms", Spread.of([ranked[len(ranked) // 2]], scale=1_000)),
        Figure("delivery, p99", "ms", Spread.of([_percentile(ranked, 0.99)], scale=1_000), DELIVERY_TARGET_MS),
        Figure("delivery, the slowest", "ms", Spread.of([ranked[-1]], scale=1_000)),
    ]
    note = (
        f"{count:,} streams on one gateway process, each of another conversation, opened in {opening:.1f} s; then "
        f"{seconds} s without an event, and {seconds} s with {APPENDS_A_SECOND:.0f} appends a second to random ones "
        f"({len(ranked):,} deliveries). Quiet, the process used {quiet:.1%} of a core; busy, {busy:.1%}."
    )
    return Result("Streams of a gateway", figures, note)


async def measure_listing(bench: Bench) -> Result:
    """Read pages of a long list: the first one, those behind it, and with filters."""
    count = bench.choose(smoke=200, short=10_000, full=50_000)
    async with running_cluster(bench.directory / "listing") as cluster, gateway_of(cluster) as (port, _, key):
        await begin_many(cluster, count)
        figures = []
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=LIMIT_SECONDS
        ) as client:
            for limit in PAGES:
                times, found = await _walk(client, limit=limit)
                assert found == count, f"{found} conversations in the pages instead of {count}"
                figures += _page_figures(f"a page of {limit}", times)
            times, found = await _walk(client, limit=50, tenant="tenant-1")
            figures += _page_figures("a page of 50 of one tenant of four", times)
            times, found = await _walk(client, limit=50, state="finished")
            figures += _page_figures("a page of none, all in another state", times)
            assert found == 0
    return Result("Pages of a list", figures, f"{count:,} conversations, every page read in turn from the newest on.")


@contextlib.asynccontextmanager
async def gateway_of(cluster: BenchCluster) -> AsyncIterator[tuple[int, int, str]]:
    """Run a gateway and return its port, its process id and a key; the cluster ends it."""
    port = free_port()
    pid = await cluster.start_gateway(port)
    _, key = await ApiKeys(cluster.client.store).add(
        "benchmark", tenant="*", scopes=Scope, requests_per_minute=1_000_000, streams=100_000
    )
    yield port, pid, key


async def begin_many(cluster: BenchCluster, count: int) -> list[str]:
    """Begin conversations that no worker takes up, each with a message."""
    names = [f"listed-{number:06}" for number in range(count)]
    log = cluster.client.log

    async def begin(number: int) -> None:
        created = ConversationCreated(
            conversation_id=names[number],
            source=EventSource.USER,
            title=f"Conversation {number}",
            tenancy=Tenancy(tenant=f"tenant-{number % TENANTS}"),
            labels={"run": str(number % 10)},
        )
        await log.create(created, [MessageAction(content="Do it.", source=EventSource.USER)])

    for start in range(0, count, BEGUN_AT_ONCE):
        await asyncio.gather(*(begin(number) for number in range(start, min(count, start + BEGUN_AT_ONCE))))
    return names


async def _deliver(
    cluster: BenchCluster, crowd: Crowd, names: Sequence[str], pid: int, seconds: float
) -> tuple[list[float], float]:
    """Append at a steady rate; returns how long each delivery took, and the share of a core that the gateway used."""
    sent: dict[tuple[str, int], float] = {}
    chosen, log = random.Random(1), cluster.client.log
    last = dict.fromkeys(names, 2)

    async def append(name: str) -> None:
        began = time.perf_counter()
        done = await log.append(name, [MessageAction(content="And this.", source=EventSource.USER)])
        assert isinstance(done, Appended)
        sent[name, done.last_id] = began

    began, cpu, tasks = time.perf_counter(), cpu_seconds(pid), []
    for number in range(int(seconds * APPENDS_A_SECOND)):
        await asyncio.sleep(max(0.0, began + number / APPENDS_A_SECOND - time.perf_counter()))
        name = chosen.choice(names)
        last[name] += 1
        tasks.append(asyncio.create_task(append(name)))
    await asyncio.gather(*tasks)
    await crowd.until(last)
    busy = (cpu_seconds(pid) - cpu) / (time.perf_counter() - began)
    return [crowd.arrived[key] - moment for key, moment in sent.items()], busy


async def _cpu_share(pid: int, seconds: float) -> float:
    began, cpu = time.perf_counter(), cpu_seconds(pid)
    await asyncio.sleep(seconds)
    return (cpu_seconds(pid) - cpu) / (time.perf_counter() - began)


async def _walk(client: httpx2.AsyncClient, **query: str | int) -> tuple[list[float], int]:
    """Read all pages; returns how long each took, and how many conversations there were."""
    times, found, cursor = [], 0, ""
    while True:
        began = time.perf_counter()
        answer = await client.get("/conversations", params={**query, "cursor": cursor})
        times.append(time.perf_counter() - began)
        page = json.loads(answer.text)
        found += len(page["conversations"])
        cursor = page["next_cursor"]
        if cursor is None:
            return times, found


def _page_figures(name: str, times: Sequence[float]) -> list[Figure]:
    ranked = sorted(times)
    slowest = Spread.of([_percentile(ranked, 0.99)], scale=1_000)
    return [Figure(name, "ms", Spread.of(times, scale=1_000), PAGE_TARGET_MS), Figure(f"{name}, p99", "ms", slowest)]


def _percentile(ranked: Sequence[float], share: float) -> float:
    return ranked[min(len(ranked) - 1, int(len(ranked) * share))]
