"""What the log costs, layer by layer: a codec's microseconds, an acknowledged append, a history read back.

    python benchmarks/append.py [--rounds 2000]

Prints medians and 95th percentiles as a table. The store is a private Valkey with `appendfsync everysec`, on a unix
socket; events are appended one at a time, each acknowledged before the next.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

from broker import codec
from broker.actions import CmdRunAction
from broker.embedded import EmbeddedValkey
from broker.event_log import Appended, EventLog
from broker.events import ConversationCreated, EventSource, ToolCallMetadata
from broker.membership import Membership
from broker.observations import CmdOutputMetadata, CmdOutputObservation
from broker.ownership import Claimed, Owners, Ownership
from broker.store import open_store

WORKER = "bench-worker"
HISTORIES = (358, 5_000)
READS = 20


def observation(cause: int) -> CmdOutputObservation:
    """An output whose wire form has 1.4 KB."""
    lines = "".join(
        f"-rw-r--r-- 1 user user {cause * 7 + n * 131:>7} Nov 21 10:{n:02} file_{cause}_{n}.py\n" for n in range(17)
    )
    return CmdOutputObservation(
        content=lines,
        command="ls -la",
        metadata=CmdOutputMetadata(exit_code=0, pid=4711, username="user", hostname="host", working_dir="/workspace"),
        cause=cause,
        source=EventSource.AGENT,
        timestamp=datetime(2026, 1, 1, tzinfo=UTC),
        tool_call_metadata=ToolCallMetadata(function_name="execute_bash", tool_call_id=f"call_{cause}", reply_id=cause),
    )


def row(name: str, seconds: list[float], unit: str, scale: float) -> str:
    ranked = sorted(second * scale for second in seconds)
    p95 = ranked[int(len(ranked) * 0.95)]
    return f"| {name:<52} | {statistics.median(ranked):>8.3f} | {p95:>8.3f} | {unit:<2} |"


async def timed(rounds: int, call: Callable[[int], Awaitable[object]]) -> list[float]:
    seconds = []
    for n in range(rounds):
        began = perf_counter()
        await call(n)
        seconds.append(perf_counter() - began)
    return seconds


def codec_rows(rounds: int) -> list[str]:
    event = observation(2)
    wire = event.wire()
    entry = codec.encode(wire)
    layers: list[tuple[str, Callable[[], object]]] = [
        ("event to wire form", event.wire),
        ("wire form to entry", lambda: codec.to_entry(wire)),
        ("entry to wire form", lambda: codec.decode_wire(entry)),
        ("entry to event", lambda: codec.decode(entry, 3)),
    ]
    rows = [f"{len(codec.msgpack.packb(wire))} bytes packed, {len(entry)} in the log\n"]
    rows += ["| one event                                            |   median |      p95 |    |"]
    rows += ["|------------------------------------------------------|----------|----------|----|"]
    for name, layer in layers:
        seconds = []
        for _ in range(rounds):
            began = perf_counter()
            for _ in range(20):
                layer()
            seconds.append((perf_counter() - began) / 20)
        rows.append(row(name, seconds, "µs", 1e6))
    return rows


async def begin(log: EventLog, owners: Owners, conversation_id: str) -> Ownership:
    await log.create(ConversationCreated(conversation_id=conversation_id))
    claimed = await owners.claim(conversation_id, WORKER)
    assert isinstance(claimed, Claimed)
    return claimed.ownership


async def store_rows(url: str, rounds: int) -> list[str]:
    store = await open_store(url)
    log, owners = EventLog(store), Owners(store)
    await Membership(store, WORKER, "controller", ttl_seconds=3_600).register()
    await begin(log, owners, "appended")
    ownership = await begin(log, owners, "cycled")

    async def append(n: int) -> None:
        await log.append_observation("appended", observation(n + 2), worker_id=WORKER)

    async def cycle(n: int) -> None:
        action = CmdRunAction(command=f"true {n}", thought=f"Step {n}.")
        last_id = 1 + 2 * n
        done = await log.append_as_owner(ownership, [action], expected_last_id=last_id, dispatch=(0,))
        assert isinstance(done, Appended)
        await log.append_observation("cycled", observation(done.last_id), worker_id=WORKER)

    async def ping(_: int) -> None:
        await store.connection.call("PING")

    rows = [
        row("round trip of a PING, for comparison", await timed(rounds, ping), "ms", 1e3),
        row("append an event", await timed(rounds, append), "ms", 1e3),
        row("append an action, then its observation", await timed(rounds, cycle), "ms", 1e3),
    ]
    for size in HISTORIES:
        name = f"history-{size}"
        await begin(log, owners, name)
        for first in range(2, size + 1, 500):
            await log.append(name, [observation(n) for n in range(first, min(first + 500, size + 1))])

        async def read(_: int, *, name: str = name, size: int = size) -> None:
            assert len(await log.read(name)) == size

        rows.append(row(f"read a history of {size:,} events", await timed(READS, read), "ms", 1e3))
    await store.aclose()
    return rows


async def measure(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="deck-") as folder:
        server = EmbeddedValkey(Path(folder))
        await server.start()
        try:
            for line in [*codec_rows(rounds), *await store_rows(server.url, rounds)]:
                print(line)
        finally:
            await server.stop()
    print(f"\n{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2_000)
    asyncio.run(measure(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
