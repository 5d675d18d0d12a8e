"""SIGKILL for controller workers and for the processes of the Claude Agent SDK, mid-tool, mid-thought and between.

Another worker, or a fresh program, continues from the log: everything ends, nothing is lost, nothing is run twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from broker.contract.events import ConversationCreated, Event, ModelReply
from broker.contract.interventions import ConversationChanged
from broker.contract.kinds import Action
from broker.contract.specs import SdkSpec
from broker.runtime.clock import SystemClock
from tests.faults.harness import FaultCluster, steps

pytestmark = pytest.mark.claude

COMMANDS = 6


def programs_of(cluster: FaultCluster) -> list[psutil.Process]:
    """Return the processes of the SDK: the sandbox, the program in it, and the CLI."""
    found: list[psutil.Process] = []
    for name, worker in cluster.workers.items():
        if name.startswith("c"):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(worker.pid).children(recursive=True)
    return found


def moment(logs: Sequence[list[Event]]) -> str:
    """Return the current stage of the conversations."""
    found = {_moment(log) for log in logs}
    return next(name for name in ("mid-tool", "mid-thought", "between") if name in found)


def _moment(log: list[Event]) -> str:
    last = log[-1]
    if isinstance(last, Action) and last.kind == "action.run":
        return "mid-tool"
    return "between" if isinstance(last, ModelReply) else "mid-thought"


async def all_are_members(cluster: FaultCluster) -> bool:
    store = cluster.client.store
    workers = await store.connection.call("ZRANGE", store.all_shards[0].workers, 0, -1)
    return all(any(f"-{worker.pid}-" in member.decode() for member in workers) for worker in cluster.workers.values())


async def nemesis(cluster: FaultCluster, ids: list[str], *, kills: int, seed: int) -> Counter[str]:
    """Kill controllers, and processes of the SDK, while conversations run."""
    seeded, clock, done = random.Random(seed), SystemClock(), Counter[str]()
    seen = dict[str, int]()
    for number in range(kills):
        await cluster.until(lambda: all_are_members(cluster), limit=60, what="full cluster")
        await cluster.until(lambda: programs_of(cluster), limit=120, what="a program of the SDK")
        await cluster.until(lambda: _have_grown(cluster, ids[-2:], seen), limit=300, what="a step of each")
        if number % 2:
            await cluster.until(lambda: _is_mid_tool(cluster, ids[-2:]), limit=300, what="a command")
        else:
            when = clock.monotonic() + seeded.uniform(0.0, 2.0)
            await cluster.until(lambda: clock.monotonic() >= when)  # noqa: B023  (awaited at once)
        logs = [await cluster.client.events(cid) for cid in ids[-2:]]
        seen.update({log[0].conversation_id: len(log) for log in logs if isinstance(log[0], ConversationCreated)})
        if seeded.random() < 0.4:
            name = seeded.choice([name for name in cluster.workers if name.startswith("c")])
            cluster.kill(name)
            cluster.start_controller(f"c{number + 100}")
            done["controllers"] += 1
        elif found := programs_of(cluster):
            with contextlib.suppress(psutil.NoSuchProcess):
                seeded.choice(found).kill()
            done["programs"] += 1
        done[moment(logs)] += 1
    return done


async def _is_mid_tool(cluster: FaultCluster, ids: list[str]) -> bool:
    logs = [await cluster.client.events(cid) for cid in ids]
    has_ended = all(log[-1].kind == "observation.agent_state_changed" for log in logs)
    return has_ended or any(_moment(log) == "mid-tool" for log in logs)


async def _have_grown(cluster: FaultCluster, ids: list[str], seen: dict[str, int]) -> bool:
    """Return whether each conversation has progressed since the last kill, or has ended: so deaths are not in a row."""
    rows = [await cluster.client.row(cid) for cid in ids]
    return all(row.state == "finished" or row.last_event_id > seen.get(row.conversation_id, 0) for row in rows)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kills", [5, 110])
async def test_kills_of_workers_and_of_the_sdk(tmp_path: Path, kills: int) -> None:
    seed = int(os.environ.get("FAULT_SEED", "2026"))
    async with FaultCluster(tmp_path).running() as cluster:
        for name in ("c1", "c2"):
            cluster.start_controller(name)
        cluster.start_tool("t1")
        ids: list[str] = []
        killing: asyncio.Task[Counter[str]] | None = None
        while killing is None or not killing.done():
            turns = steps(COMMANDS, seconds=1.0)
            sdk = SdkSpec(fallback_to_legacy=False)
            wave = await cluster.submit(turns, count=2, latency=0.8, name="CodeActAgentSDK", sdk=sdk)
            ids += wave
            killing = killing or asyncio.create_task(nemesis(cluster, ids, kills=kills, seed=seed))
            await cluster.settle(wave, limit=600)
            await cluster.close_workspaces(wave)
        done = await killing
        await cluster.check(ids, commands=COMMANDS)
        changes = [
            event for cid in ids for event in await cluster.client.events(cid) if isinstance(event, ConversationChanged)
        ]
        assert not changes  # no legacy agent has helped
        print(
            f"\nseed {seed}: {dict(done)}, {len(ids)} conversations, {len(ids) * COMMANDS} commands, 0 lost, 0 doubled"
        )
