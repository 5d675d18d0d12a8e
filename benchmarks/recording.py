"""What it costs to put an event into the log, acknowledged, one at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping

from benchmarks.bench import Bench, spread
from benchmarks.cluster import BenchCluster, running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.history import observation, output
from benchmarks.machine import on_one_core
from broker.contract.actions import CmdRunAction
from broker.contract.events import ConversationCreated
from broker.contract.fencing import Ownership
from broker.coordination.membership import Membership
from broker.coordination.ownership import ClaimedConversation, Owners
from broker.runtime.ids import new_conversation_id, new_worker_id

APPEND_TARGET_MS = 0.1
CYCLE_TARGET_MS = 0.2


async def measure(bench: Bench) -> Result:
    """Append single events, and actions with their observations, in turns with the peer."""
    rounds = bench.choose(smoke=1, short=8, full=24)
    ours, theirs = bench.choose(smoke=20, short=300, full=300), bench.choose(smoke=5, short=100, full=300)
    found: dict[str, list[float]] = {
        name: [] for name in (*WAYS, *(f"{name}, one core" for name in WAYS), "on disk", "peer append", "peer cycle")
    }
    async with (
        running_cluster(bench.directory / "recording") as cluster,
        running_cluster(bench.directory / "recording-always", append_fsync="always") as synced,
    ):
        store_pid = await cluster.store_pid()
        for _ in range(rounds):
            for name, way in WAYS.items():
                found[name].append(await way(cluster, ours))
            found["peer append"] += await _peer(bench, "append", theirs)
            found["on disk"].append(await _append(synced, theirs))
            found["peer cycle"] += await _peer(bench, "cycle", theirs)
            with on_one_core(store_pid):
                for name, way in WAYS.items():
                    found[f"{name}, one core"].append(await way(cluster, ours))
    peers = {name: spread(found[f"peer {name}"], scale=1_000) for name in ("append", "cycle")}

    def figure(name: str, kind: str, target: float | None = None, peer: Spread | None = None) -> Figure:
        return Figure(name, "ms", Spread.of(found[kind], scale=1_000), target, peer)

    return Result(
        "Recording",
        (
            figure("a command that does nothing, for comparison", "ping"),
            figure("append an event of 1.4 KB", "append", peer=peers["append"]),
            figure("append an action, then its observation", "cycle", peer=peers["cycle"]),
            figure("append an event, on disk before the answer", "on disk", peer=peers["append"]),
            figure("on one core: a command that does nothing", "ping, one core"),
            figure("on one core: append an event of 1.4 KB", "append, one core", APPEND_TARGET_MS),
            figure("on one core: append an action, then its observation", "cycle, one core", CYCLE_TARGET_MS),
        ),
        "Each value is the median of one round. Deckhands: `appendfsync everysec`, except on disk (`always`). The SDK "
        "writes each event to disk before it continues. Where the scheduler puts client and store on two cores, these "
        "wake each other, which on a virtual machine takes longer than the work; the last three lines are without.",
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


Way = Callable[[BenchCluster, int], Awaitable[float]]
WAYS: Mapping[str, Way] = {"ping": _ping, "append": _append, "cycle": _cycle}


async def _begin(cluster: BenchCluster) -> Ownership:
    """Begin a conversation that this process owns."""
    conversation_id, worker_id = new_conversation_id(), new_worker_id("controller")
    await Membership(cluster.client.store, worker_id, "controller", ttl_seconds=600).register()
    await cluster.client.log.create(ConversationCreated(conversation_id=conversation_id))
    claimed = await Owners(cluster.client.store).claim(conversation_id, worker_id)
    assert isinstance(claimed, ClaimedConversation), claimed
    return claimed.ownership


async def _peer(bench: Bench, work: str, count: int) -> list[float]:
    answer = await bench.peer(work, count=count, text=output(count))
    return [statistics.median(answer["seconds"])] if answer else []
