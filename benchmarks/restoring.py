"""What it costs to take up a conversation that another worker left off."""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable, Callable, Mapping

from benchmarks.bench import Bench, spread
from benchmarks.cluster import running_cluster
from benchmarks.figures import Figure, Result, Spread
from benchmarks.history import conversation, output
from broker.celery.bootstep import GC_THRESHOLDS
from broker.contract import codec
from broker.coordination.membership import Membership
from broker.coordination.ownership import ClaimedConversation, Owners
from broker.runtime.ids import new_conversation_id, new_worker_id
from controller_worker.core.controller import fold
from controller_worker.core.state import State, parse_snapshot, to_snapshot
from controller_worker.memory.conversation_memory import ConversationMemory
from deckhands.client.client import Client

EVENTS = 358
LONG_EVENTS = 5_000
LAG = 49
"""The most that a snapshot can be behind."""
SNAPSHOT_TARGET_MS = 5.0
REPLAY_TARGET_MS = 10.0
LONG_REPLAY_TARGET_MS = 50.0


async def measure(bench: Bench) -> Result:
    """Restore the state of a conversation in three ways, in turns with the peer."""
    rounds = bench.choose(smoke=2, short=20, full=100)
    found: dict[str, list[float]] = {name: [] for name in (*WAYS, "peer read", "peer opened")}
    found |= {f"long {name}": [] for name in WAYS}
    async with running_cluster(bench.directory / "restoring") as cluster:
        client = cluster.client
        gc.freeze()  # as a worker does, see `LoopThread`
        gc.set_threshold(*GC_THRESHOLDS)
        conversation_id = await _conversation_with_snapshot(client, EVENTS)
        long_events = bench.choose(smoke=EVENTS, short=LONG_EVENTS, full=LONG_EVENTS)
        long_id = await _conversation_with_snapshot(client, long_events)
        for _ in range(4):
            for _ in range(max(rounds // 4, 1)):
                for kind, restore in WAYS.items():
                    found[kind].append(await _seconds(restore, client, conversation_id, EVENTS))
            for kind, restore in WAYS.items():
                found[f"long {kind}"].append(await _seconds(restore, client, long_id, long_events))
            answer = await bench.peer("replay", events=EVENTS, rounds=max(rounds // 4, 1), text=output(0))
            found["peer read"] += answer.get("read", [])
            found["peer opened"] += answer.get("opened", [])
        size = await client.store.connection.call("MEMORY", "USAGE", client.store.known_keys(conversation_id).events)
    figures = (
        Figure(
            "restore from the snapshot, 49 events behind",
            "ms",
            Spread.of(found["snapshot"], scale=1_000),
            SNAPSHOT_TARGET_MS,
            spread(found["peer opened"], scale=1_000),
        ),
        Figure(
            "restore by replay of the whole log",
            "ms",
            Spread.of(found["replay"], scale=1_000),
            REPLAY_TARGET_MS,
            spread(found["peer read"], scale=1_000),
        ),
        Figure("restore, and the next prompt's messages", "ms", Spread.of(found["prompt"], scale=1_000)),
        Figure("from the snapshot, of 5,000 events", "ms", Spread.of(found["long snapshot"], scale=1_000)),
        Figure("by replay, of 5,000 events", "ms", Spread.of(found["long replay"], scale=1_000), LONG_REPLAY_TARGET_MS),
        Figure(
            "of it, the entries read and unpacked, no event made", "ms", Spread.of(found["long floor"], scale=1_000)
        ),
        Figure("by replay, and the messages, of 5,000 events", "ms", Spread.of(found["long prompt"], scale=1_000)),
    )
    note = (
        f"A conversation of {EVENTS} events, whose log takes {size / 1024:.0f} KiB of the store's memory, and one of "
        f"{LONG_EVENTS:,}. The SDK: to open the conversation, and to read its event log."
    )
    return Result("Restoring", figures, note)


async def _conversation_with_snapshot(client: Client, count: int) -> str:
    """Write the conversation and the snapshot that its owner would have kept last."""
    conversation_id, worker_id = new_conversation_id(), new_worker_id("controller")
    await client.log.create(*conversation(conversation_id, count))
    events = await client.log.read(conversation_id)
    assert len(events) == count
    await Membership(client.store, worker_id, "controller", ttl_seconds=600).register()
    owners = Owners(client.store)
    claimed = await owners.claim(conversation_id, worker_id)
    assert isinstance(claimed, ClaimedConversation), claimed
    assert await owners.save_snapshot(claimed.ownership, to_snapshot(fold(State(), events[: count - LAG])))
    return conversation_id


async def _from_snapshot(client: Client, conversation_id: str, count: int) -> None:
    state = parse_snapshot(await Owners(client.store).load_snapshot(conversation_id))
    assert state is not None
    assert fold(state, await client.log.read(conversation_id, after=state.version)).version == count


async def _by_replay(client: Client, conversation_id: str, count: int) -> None:
    assert fold(State(), await client.log.read(conversation_id)).version == count


async def _with_messages(client: Client, conversation_id: str, count: int) -> None:
    events = await client.log.read(conversation_id)
    memory = ConversationMemory()
    for event in events:
        memory.add(event)
    assert memory.messages()
    assert fold(State(), events).version == count


async def _entries_only(client: Client, conversation_id: str, count: int) -> None:
    """Read the log and unpack its entries: the floor of a replay."""
    entries = await client.store.call("XRANGE", client.store.known_keys(conversation_id).events, "-", "+")
    assert len([codec.decode_wire(fields[1]) for _, fields in entries]) == count


Way = Callable[[Client, str, int], Awaitable[None]]
WAYS: Mapping[str, Way] = {
    "snapshot": _from_snapshot,
    "replay": _by_replay,
    "prompt": _with_messages,
    "floor": _entries_only,
}


async def _seconds(restore: Way, client: Client, conversation_id: str, count: int) -> float:
    began = time.perf_counter()
    await restore(client, conversation_id, count)
    return time.perf_counter() - began
