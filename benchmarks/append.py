"""What the log costs, layer by layer: a codec's microseconds, an acknowledged append, a history read back.

    python benchmarks/append.py [--rounds 2000]

Prints medians and 95th percentiles as a table, and beside them the CPU that this process (not the store) used on
average, which a busy machine hardly changes. The store is a private Valkey with `appendfsync everysec`, on a unix
socket; events are appended one at a time, each acknowledged before the next.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, process_time

from broker.contract import codec
from broker.contract.actions import CmdRunAction
from broker.contract.events import ConversationCreated, EventSource, ToolCallMetadata
from broker.contract.fencing import Ownership
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation
from broker.coordination.membership import Membership
from broker.coordination.ownership import ClaimedConversation, Owners
from broker.log.append_call import Appended
from broker.log.event_log import EventLog
from broker.store.embedded import EmbeddedValkey
from broker.store.store import open_store

WORKER = "bench-worker"
HISTORIES = (358, 5_000)
READS = 20
REPEATS = 20


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


@dataclass
class Times:
    """How long each repetition took, and the CPU of all of them, in seconds."""

    each: list[float]
    cpu: float

    def row(self, name: str, unit: str, scale: float) -> str:
        ranked = sorted(second * scale for second in self.each)
        figures = (statistics.median(ranked), ranked[int(len(ranked) * 0.95)], self.cpu / len(ranked) * scale)
        return f"| {name:<42} | " + " | ".join(f"{figure:>8.3f}" for figure in figures) + f" | {unit:<2} |"


async def timed(rounds: int, call: Callable[[int], Awaitable[object]]) -> Times:
    seconds = []
    cpu = process_time()
    for n in range(rounds):
        began = perf_counter()
        await call(n)
        seconds.append(perf_counter() - began)
    return Times(seconds, process_time() - cpu)


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
    rows += ["|                                            |   median |      p95 |      CPU |    |"]
    rows += ["|--------------------------------------------|----------|----------|----------|----|"]
    for name, layer in layers:
        seconds = []
        cpu = process_time()
        for _ in range(rounds):
            began = perf_counter()
            for _ in range(REPEATS):
                layer()
            seconds.append((perf_counter() - began) / REPEATS)
        rows.append(Times(seconds, (process_time() - cpu) / REPEATS).row(name, "µs", 1e6))
    return rows


async def begin(log: EventLog, owners: Owners, conversation_id: str) -> Ownership:
    await log.create(ConversationCreated(conversation_id=conversation_id))
    claimed = await owners.claim(conversation_id, WORKER)
    assert isinstance(claimed, ClaimedConversation)
    return claimed.ownership


async def store_rows(url: str, rounds: int) -> list[str]:
    store = await open_store(url)
    log, owners = EventLog(store), Owners(store)
    await Membership(store, WORKER, "controller", ttl_seconds=3_600).register()
    await begin(log, owners, "appended")
    ownership = await begin(log, owners, "cycled")

    observations = [observation(cause) for cause in range(2, 2 * rounds + 2)]

    async def append(n: int) -> None:
        await log.append_observation("appended", observations[n], worker_id=WORKER)

    async def cycle(n: int) -> None:
        action = CmdRunAction(command=f"true {n}", thought=f"Step {n}.")
        last_id = 1 + 2 * n
        done = await log.append_as_owner(ownership, [action], expected_last_id=last_id, dispatch=(0,))
        assert isinstance(done, Appended)
        await log.append_observation("cycled", observations[done.last_id - 2], worker_id=WORKER)

    async def ping(_: int) -> None:
        await store.connection.call("PING")

    rows = [
        (await timed(rounds, ping)).row("round trip of a PING, for comparison", "ms", 1e3),
        (await timed(rounds, append)).row("append an event", "ms", 1e3),
        (await timed(rounds, cycle)).row("append an action, then its observation", "ms", 1e3),
    ]
    for size in HISTORIES:
        name = f"history-{size}"
        await begin(log, owners, name)
        for first in range(2, size + 1, 500):
            await log.append(name, [observation(n) for n in range(first, min(first + 500, size + 1))])

        async def read(_: int, *, name: str = name, size: int = size) -> None:
            assert len(await log.read(name)) == size

        rows.append((await timed(READS, read)).row(f"read a history of {size:,} events", "ms", 1e3))
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
