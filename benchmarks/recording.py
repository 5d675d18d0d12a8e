"""What it costs to put an event into the log, acknowledged, one at a time."""

from __future__ import annotations

import statistics
import time

from benchmarks.bench import Bench, spread
from benchmarks.cluster import BenchCluster, running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.history import observation, output
from broker.actions import CmdRunAction
from broker.events import ConversationCreated
from broker.ids import new_conversation_id, new_worker_id
from broker.membership import Membership
from broker.ownership import Claimed, Owners, Ownership

APPEND_TARGET_MS = 0.1
CYCLE_TARGET_MS = 0.2


async def measure(bench: Bench) -> Result:
    """Append single events, and actions with their observations, in turns with the peer."""
    rounds = bench.choose(smoke=1, short=8, full=24)
    ours, theirs = bench.choose(smoke=20, short=300, full=300), bench.choose(smoke=5, short=100, full=300)
    found: dict[str, list[float]] = {
        name: [] for name in ("ping", "append", "cycle", "synced", "peer append", "peer cycle")
    }
    async with (
        running_cluster(bench.directory / "recording") as cluster,
        running_cluster(bench.directory / "recording-always", append_fsync="always") as synced,
    ):
        for _ in range(rounds):
            found["ping"].append(await _ping(cluster, ours))
            found["append"].append(await _append(cluster, ours))
            found["peer append"] += await _peer(bench, "append", theirs)
            found["synced"].append(await _append(synced, theirs))
            found["cycle"].append(await _cycle(cluster, ours))
            found["peer cycle"] += await _peer(bench, "cycle", theirs)
    return Result(
        "Recording",
        (
            Figure("a command that does nothing, for comparison", "ms", Spread.of(found["ping"], scale=1_000)),
            Figure(
                "append an event of 1.4 KB",
                "ms",
                Spread.of(found["append"], scale=1_000),
                APPEND_TARGET_MS,
                spread(found["peer append"], scale=1_000),
            ),
            Figure(
                "append an action, then its observation",
                "ms",
                Spread.of(found["cycle"], scale=1_000),
                CYCLE_TARGET_MS,
                spread(found["peer cycle"], scale=1_000),
            ),
            Figure(
                "append an event, on disk before the answer",
                "ms",
                Spread.of(found["synced"], scale=1_000),
                None,
                spread(found["peer append"], scale=1_000),
            ),
        ),
        "Each value is the median of one round. Deckhands: `appendfsync everysec`, except in the last line (`always`). "
        "The SDK writes each event to disk before it goes on.",
    )


async def _ping(cluster: BenchCluster, count: int) -> float:
    """Go to the store and back, and return the median of the seconds: less than this nothing can take here."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        await cluster.client.store.connection.call("PING")
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


async def _append(cluster: BenchCluster, count: int) -> float:
    """Append observations as a tool worker does, and return the median of their seconds."""
    log, ownership = cluster.client.log, await _begin(cluster)
    seconds = []
    for event in [observation(number + 2, seed=number) for number in range(count)]:
        began = time.perf_counter()
        await log.append_observation(ownership.conversation_id, event, worker_id="tool")
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


async def _cycle(cluster: BenchCluster, count: int) -> float:
    """Append actions as their owner, each followed by its observation; return the median of their seconds."""
    log, ownership = cluster.client.log, await _begin(cluster)
    last_id, seconds = 1, []
    steps = [
        (CmdRunAction(command=f"true {number}", thought=f"Step {number}."), observation(2 * number + 2, seed=number))
        for number in range(count)
    ]
    for action, event in steps:
        began = time.perf_counter()
        await log.append_as_owner(ownership, [action], expected_last_id=last_id, dispatch=(0,))
        await log.append_observation(ownership.conversation_id, event, worker_id="tool")
        seconds.append(time.perf_counter() - began)
        last_id += 2
    return statistics.median(seconds)


async def _begin(cluster: BenchCluster) -> Ownership:
    """Begin a conversation that this process owns."""
    conversation_id, worker_id = new_conversation_id(), new_worker_id("controller")
    await Membership(cluster.client.store, worker_id, "controller", ttl_seconds=600).register()
    await cluster.client.log.create(ConversationCreated(conversation_id=conversation_id))
    claimed = await Owners(cluster.client.store).claim(conversation_id, worker_id)
    assert isinstance(claimed, Claimed), claimed
    return claimed.ownership


async def _peer(bench: Bench, work: str, count: int) -> list[float]:
    answer = await bench.peer(work, count=count, text=output(count))
    return [statistics.median(answer["seconds"])] if answer else []
