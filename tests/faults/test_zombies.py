"""Workers that stop past their heartbeat and come back: whatever they append is refused."""

from __future__ import annotations

import re
import signal

import psutil
import pytest

from tests.faults.harness import FaultCluster, steps


async def test_a_controller_that_comes_back_is_fenced(cluster: FaultCluster) -> None:
    cluster.start_tool()
    cluster.start_controller("zombie", DECKHANDS_FAILPOINTS="controller.before_append:stop@3")
    ids = await cluster.submit(steps(3))
    await cluster.until_kind(ids[0], "observation.run")
    cluster.start_controller("survivor")
    await cluster.settle(ids)
    before = await cluster.client.events(ids[0])
    cluster.signal("zombie", signal.SIGCONT)
    await cluster.until(lambda: "presumed dead" in cluster.log_of("zombie"))
    # Whether it hears first that its append was refused or that it was swept is a matter of luck.
    assert await cluster.client.events(ids[0]) == before
    await cluster.check(ids, commands=3)


@pytest.mark.soak
async def test_zombies_append_is_fenced_despite_an_equal_log(cluster: FaultCluster) -> None:
    """Only the token refuses it: its successor has the conversation, and has not appended anything yet."""
    cluster.start_tool()
    zombie = cluster.start_controller("zombie", DECKHANDS_FAILPOINTS="controller.before_append:stop@3")
    ids = await cluster.submit(steps(3))
    await cluster.until(lambda: psutil.Process(zombie.pid).status() == "stopped")
    before = await cluster.client.events(ids[0])
    successor = cluster.start_controller("successor", DECKHANDS_FAILPOINTS="controller.before_append:stop@1")
    await cluster.until(lambda: psutil.Process(successor.pid).status() == "stopped")
    cluster.signal("zombie", signal.SIGCONT)
    await cluster.until(lambda: re.search("taken over by other workers|presumed dead", cluster.log_of("zombie")))
    assert await cluster.client.events(ids[0]) == before
    cluster.signal("successor", signal.SIGCONT)
    await cluster.settle(ids)
    await cluster.check(ids, commands=3)


@pytest.mark.soak
async def test_a_zombie_serves_again_under_a_new_name(cluster: FaultCluster) -> None:
    cluster.start_tool()
    cluster.start_controller("zombie", DECKHANDS_FAILPOINTS="controller.before_append:stop@3")
    ids = await cluster.submit(steps(3))
    await cluster.until_kind(ids[0], "observation.run")
    cluster.start_controller("survivor")
    await cluster.settle(ids)
    cluster.signal("zombie", signal.SIGCONT)
    await cluster.until(lambda: "presumed dead" in cluster.log_of("zombie"))
    cluster.kill("survivor")
    more = await cluster.submit(steps(2))
    await cluster.settle(more)
    await cluster.check([*ids, *more], commands=2)


async def test_a_tool_worker_that_comes_back_adds_nothing(cluster: FaultCluster) -> None:
    cluster.start_controller()
    cluster.start_tool("zombie", DECKHANDS_FAILPOINTS="tool.before_append:stop@1")
    ids = await cluster.submit(steps(2))
    await cluster.until(lambda: "end-0" in cluster.effects(ids[0]))
    cluster.start_tool("survivor")
    await cluster.settle(ids)
    before = await cluster.client.events(ids[0])
    cluster.signal("zombie", signal.SIGCONT)
    await cluster.until(lambda: "presumed dead" in cluster.log_of("zombie"))
    assert await cluster.client.events(ids[0]) == before
    await cluster.check(ids, commands=2)
