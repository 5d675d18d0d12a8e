"""A worker whose loop is held up: for seconds it keeps what it has, for longer it is taken over."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.log.conversations import Conversations
from broker.runtime.clock import SystemClock
from tests.faults.harness import FaultCluster, steps

BUSY_SECONDS = 4.0
"""More than twice what a heartbeat may be late."""


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
    assert [takeover.from_worker for takeover in await Conversations(cluster.client.store).list_takeovers()]
    gate.unlink()
    await cluster.until(lambda: "presumed dead" in cluster.log_of("stuck"))
    await cluster.check(ids, commands=3)
