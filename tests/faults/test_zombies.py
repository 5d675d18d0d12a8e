"""Workers that are stopped past their heartbeat and return, or whose loop is blocked: their appends are refused.

One that is blocked for seconds keeps its work; the log of each lists taken, settled and lost conversations.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Awaitable
from pathlib import Path

import pytest

from broker.coordination.membership import list_members
from broker.coordination.shard_raise import raise_shards
from broker.log.conversations import Conversations
from broker.runtime.clock import SystemClock
from tests.faults.harness import FaultCluster, steps

BUSY_SECONDS = 4.0
"""More than twice what a heartbeat may be late."""
COUNT = 8


def presumed_dead(cluster: FaultCluster, name: str) -> Awaitable[None]:
    return cluster.until(lambda: "presumed dead" in cluster.log_of(name), limit=60, what=f"the awakening of {name}")


async def test_a_controller_that_comes_back_is_fenced(cluster: FaultCluster) -> None:
    cluster.start_tool()
    cluster.start_controller("zombie", DECKHANDS_FAILPOINTS="controller.before_append:stop@3")
    ids = await cluster.submit(steps(3))
    await cluster.until_kind(ids[0], "observation.run")
    cluster.start_controller("survivor")
    await cluster.settle(ids)
    before = await cluster.client.events(ids[0])
    cluster.signal("zombie", signal.SIGCONT)
    await presumed_dead(cluster, "zombie")
    # Whether it hears first that its append was refused or that it was swept is a matter of luck.
    assert await cluster.client.events(ids[0]) == before
    await cluster.check(ids, commands=3)


async def test_a_tool_worker_that_comes_back_adds_nothing(cluster: FaultCluster) -> None:
    cluster.start_controller()
    cluster.start_tool("zombie", DECKHANDS_FAILPOINTS="tool.before_append:stop@1")
    ids = await cluster.submit(steps(2))
    await cluster.until(lambda: "end-0" in cluster.effects(ids[0]))
    cluster.start_tool("survivor")
    await cluster.settle(ids)
    before = await cluster.client.events(ids[0])
    cluster.signal("zombie", signal.SIGCONT)
    await presumed_dead(cluster, "zombie")
    assert await cluster.client.events(ids[0]) == before
    await cluster.check(ids, commands=2)


async def hold_the_loop(cluster: FaultCluster, gate: Path, seconds: float) -> None:
    """Wait until a worker has come to its gate, and open it some seconds later."""
    await cluster.until(gate.exists, what="loop held up")
    clock = SystemClock()
    until = clock.monotonic() + seconds
    await cluster.until(lambda: clock.monotonic() >= until)
    gate.unlink()


@pytest.mark.parametrize(
    "place", ["controller.model_thinking", pytest.param("tool.before_append", marks=pytest.mark.soak)]
)
async def test_worker_with_a_burst_keeps_its_conversations(cluster: FaultCluster, place: str) -> None:
    gate = cluster.root / "gate"
    start, start_other = cluster.start_controller, cluster.start_tool
    if place.startswith("tool."):
        start, start_other = start_other, start
    start_other("other")
    start("busy", DECKHANDS_FAILPOINTS=f"{place}:pause@2:{gate}")
    ids = await cluster.submit(steps(3))
    await hold_the_loop(cluster, gate, BUSY_SECONDS)
    await cluster.settle(ids)
    assert "presumed dead" not in cluster.log_of("busy")
    assert await Conversations(cluster.client.store).list_takeovers() == []
    await cluster.check(ids, commands=3)


async def test_a_controller_that_is_stuck_is_taken_over(cluster: FaultCluster) -> None:
    cluster.start_tool()
    gate = cluster.root / "gate"
    cluster.start_controller("stuck", DECKHANDS_FAILPOINTS=f"controller.model_thinking:pause@2:{gate}")
    ids = await cluster.submit(steps(3))
    await cluster.until(gate.exists, what="loop held up")
    cluster.start_controller("survivor")
    await cluster.settle(ids)
    assert await Conversations(cluster.client.store).list_takeovers()
    gate.unlink()
    await presumed_dead(cluster, "stuck")
    await cluster.check(ids, commands=3)


async def test_worker_swept_in_one_shard_hands_back_the_others(cluster: FaultCluster) -> None:
    """A primary that fails over may presume a worker dead that the other primaries hear in time."""
    store = cluster.client.store
    if store.shards == 1:
        await raise_shards(store, 4)
    cluster.start(DECKHANDS_HEARTBEAT_TTL_SECONDS="100000")  # nothing expires in the other shards
    ids = await cluster.submit(steps(2, seconds=0.5), count=4 * store.shards)
    await cluster.until(lambda: all("begin-0" in cluster.effects(cid) for cid in ids), limit=60, what="first steps")
    for member in await list_members(store):
        await store.call_function("deck_leave", (store.all_shards[0].root,), member.worker_id)
    for name in ("c1", "t1"):
        await presumed_dead(cluster, name)
    await cluster.check(ids, commands=2)


def lines(cluster: FaultCluster, name: str, pattern: str) -> list[str]:
    return [line for line in cluster.log_of(name).splitlines() if re.search(pattern, line)]


async def test_conversation_logs_a_line_when_taken_lost_and_settled(cluster: FaultCluster) -> None:
    cluster.start_controller("zombie")
    ids = await cluster.submit(steps(1), count=COUNT, latency=600.0)
    await cluster.until(lambda: len(lines(cluster, "zombie", "is claimed")) == COUNT, limit=60, what="all are taken")
    cluster.signal("zombie", signal.SIGSTOP)
    cluster.start_controller("survivor")
    await cluster.until(lambda: len(lines(cluster, "survivor", "is claimed")) == COUNT, limit=60, what="the takeover")
    cluster.signal("zombie", signal.SIGCONT)
    await presumed_dead(cluster, "zombie")
    await cluster.until(lambda: lines(cluster, "zombie", "taken over by other workers"), limit=60, what="its losses")
    for cid in ids:
        await cluster.client.cancel(cid, wait_seconds=60)
        settled = f"INFO .* conversation {cid} settles as stopped at event \\d+$"
        await cluster.until(lambda: len(lines(cluster, "survivor", settled)) == 1, what="its end")  # noqa: B023
    lost = lines(cluster, "zombie", "taken over by other workers")
    assert len(lost) < COUNT, lost
    assert all(sum(cid in line for cid in ids) <= 5 for line in lost), lost
    assert not lines(cluster, "zombie", "fenced")
