"""A tool worker killed at every boundary: the running command is not lost and not run twice."""

from __future__ import annotations

import pytest

from tests.faults.harness import FaultCluster, steps

BOUNDARIES = [
    "tool.after_claim@1",
    "tool.after_result@1",
    "tool.after_append@1",
    *(pytest.param(f"tool.before_{what}@1", marks=pytest.mark.soak) for what in ("claim", "run", "append")),
    pytest.param("tool.before_claim@3", marks=pytest.mark.slow),
    pytest.param("tool.after_result@3", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("boundary", BOUNDARIES)
async def test_action_survives_a_kill_at(cluster: FaultCluster, boundary: str) -> None:
    name, _, hit = boundary.partition("@")
    cluster.start_controller()
    cluster.start_tool("victim", DECKHANDS_FAILPOINTS=f"{name}:kill@{hit}")
    ids = await cluster.submit(steps(3))
    assert await cluster.until_ended("victim") == -9
    cluster.start_tool("survivor")
    await cluster.settle(ids)
    await cluster.check(ids, commands=3)


async def test_running_command_is_collected_by_the_next_worker(cluster: FaultCluster) -> None:
    cluster.start_controller()
    cluster.start_tool("victim")
    ids = await cluster.submit(steps(2, seconds=4.0))
    await cluster.until(lambda: cluster.effects(ids[0]) == ["begin-0"])
    cluster.kill("victim")
    cluster.start_tool("survivor")
    await cluster.settle(ids)
    await cluster.check(ids, commands=2)
    outputs = [event for event in await cluster.client.events(ids[0]) if event.kind == "observation.run"]
    assert [output.content.strip() for output in outputs] == ["done 0", "done 1"]
    assert cluster.effects(ids[0]) == ["begin-0", "end-0", "begin-1", "end-1"]


async def test_both_kinds_of_worker_die_at_once(cluster: FaultCluster) -> None:
    cluster.start_controller("c1")
    cluster.start_tool("t1")
    ids = await cluster.submit(steps(3, seconds=1.0), count=3)
    await cluster.until(lambda: all("begin-1" in cluster.effects(cid) for cid in ids))
    cluster.kill("c1")
    cluster.kill("t1")
    cluster.start_controller("c2")
    cluster.start_tool("t2")
    await cluster.settle(ids)
    await cluster.check(ids, commands=3)
