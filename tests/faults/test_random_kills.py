"""Random SIGKILLs of workers while many conversations run: all end, nothing is lost, nothing is doubled.

By chance, three kills in a row can hit the controller that runs one conversation. It is then a dead letter, as promised,
and continues where it was when it is requeued.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from broker.contract.agent_state import AgentState
from broker.log.conversations import Conversations
from broker.runtime.clock import SystemClock
from tests.faults.harness import FaultCluster, steps
from tests.polling import unhurried

TAKEOVER_LIMIT_SECONDS = 3.0


async def nemesis(cluster: FaultCluster, *, kills: int, seed: int) -> dict[str, float]:
    """Kill and replace workers at random, each while the others live; returns when each process died, by its id."""
    seeded = random.Random(seed)
    clock = SystemClock()
    deaths: dict[str, float] = {}
    for number in range(kills):
        await cluster.until(lambda: _all_are_members(cluster), limit=60, what="full cluster")
        when = clock.monotonic() + seeded.uniform(0.0, 0.6)
        await cluster.until(lambda: clock.monotonic() >= when)  # noqa: B023  (awaited at once)
        name = seeded.choice(sorted(cluster.workers))
        if name.startswith("c"):  # the death of one that owns nothing is no takeover
            await cluster.until(lambda: _owners(cluster), limit=60, what="a controller with work")
            name = seeded.choice(await _owners(cluster) or [name])
        deaths[str(cluster.workers[name].pid)] = clock.now().timestamp()
        cluster.kill(name)
        start = cluster.start_controller if name.startswith("c") else cluster.start_tool
        start(f"{name[0]}{number + 100}")
    return deaths


async def _members(cluster: FaultCluster) -> list[str]:
    call = cluster.client.store.connection.call
    return [name.decode() for name in await call("ZRANGE", cluster.client.store.all_shards[0].workers, 0, -1)]


async def _owners(cluster: FaultCluster) -> list[str]:
    """Return the controllers that own a conversation, by their names here."""
    store = cluster.client.store
    at_work = [
        member
        for member in await _members(cluster)
        if any(await store.call_many([("SCARD", one.worker_conversations(member)) for one in store.all_shards]))
    ]
    return sorted(
        name
        for name, worker in cluster.workers.items()
        if name.startswith("c") and any(f"-{worker.pid}-" in member for member in at_work)
    )


async def _all_are_members(cluster: FaultCluster) -> bool:
    workers = await _members(cluster)
    pids = [worker.pid for worker in cluster.workers.values()]
    return all(any(f"-{pid}-" in worker for worker in workers) for pid in pids)


async def _redrive_dead_letters(cluster: FaultCluster, ids: Sequence[str]) -> list[str]:
    """Requeue the conversations that three controllers in a row died with; each death must be a recorded takeover."""
    conversations = Conversations(cluster.client.store)
    takeovers = Counter(takeover.conversation_id for takeover in await conversations.list_takeovers())
    dead = [cid for cid in ids if (await cluster.client.row(cid)).state == AgentState.ERROR]
    for cid in dead:
        assert "crashed its worker" in (await cluster.client.row(cid)).fields["last_error"]
        assert takeovers[cid] >= 3
        await conversations.requeue(cid)
        await cluster.client.resume(cid)
    return dead


async def run_with_kills(cluster: FaultCluster, *, conversations: int, kills: int, seed: int) -> None:
    for n in (1, 2):
        cluster.start_controller(f"c{n}")
        cluster.start_tool(f"t{n}")
    waves: list[list[str]] = []
    redriven: Counter[str] = Counter()
    killing = asyncio.create_task(nemesis(cluster, kills=kills, seed=seed))
    while not killing.done() or not waves:
        waves.append(await cluster.submit(steps(6, seconds=0.2), count=conversations, latency=0.2))
        await cluster.settle(waves[-1], limit=300)
        while dead := await _redrive_dead_letters(cluster, waves[-1]):
            redriven.update(dead)
            await cluster.settle(dead, limit=300)
        await cluster.close_workspaces(waves[-1])
    deaths = await killing
    ids = [cid for wave in waves for cid in wave]
    assert redriven.total() <= kills // 50
    for cid in ids:  # the action in flight of a dead letter is settled with an error
        await cluster.check([cid], commands=6 - redriven[cid])
    times = [
        takeover.at.timestamp() - died
        for takeover in await Conversations(cluster.client.store).list_takeovers()
        if (died := deaths.get(takeover.from_worker.split("-")[2])) is not None
    ]
    times.sort()
    assert times
    print(
        f"\nseed {seed}: {kills} kills, {len(ids)} conversations, {len(times)} takeovers, {redriven.total()} redriven, "
        f"p50 {statistics.median(times):.2f} s, p99 {times[int(len(times) * 0.99)]:.2f} s, 0 lost, 0 doubled"
    )
    assert times[int(len(times) * 0.99)] <= unhurried(TAKEOVER_LIMIT_SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_two_hundred_random_kills(tmp_path: Path) -> None:
    seed = int(os.environ.get("FAULT_SEED", "2026"))
    async with FaultCluster(tmp_path).running() as cluster:
        await run_with_kills(cluster, conversations=50, kills=200, seed=seed)
