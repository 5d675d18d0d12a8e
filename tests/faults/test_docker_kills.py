"""A tool worker killed while its command runs in a container: the container continues, and the next worker collects."""

from __future__ import annotations

import subprocess

import pytest

from tests.docker_image import image
from tests.faults.harness import FaultCluster, steps
from tests.polling import until

pytestmark = pytest.mark.docker


@pytest.mark.parametrize("boundary", ["", "tool.before_run@1", "tool.after_result@1"])
async def test_a_command_in_a_container_is_run_once(cluster: FaultCluster, boundary: str) -> None:
    settings = {"DECKHANDS_SANDBOX": "docker", "DECKHANDS_DOCKER_IMAGES": image()}
    name, _, hit = boundary.partition("@")
    cluster.start_controller()
    failpoint = {"DECKHANDS_FAILPOINTS": f"{name}:kill@{hit}"} if boundary else {}
    cluster.start_tool("victim", **settings, **failpoint)
    ids = await cluster.submit(steps(2, seconds=0.5 if boundary else 4.0), sandbox="docker")
    if boundary:
        assert await cluster.until_ended("victim", limit=60) == -9
    else:
        await cluster.until(lambda: cluster.effects(ids[0]) == ["begin-0"], limit=60)
        cluster.kill("victim")
    cluster.start_tool("survivor", **settings)
    await cluster.settle(ids)
    await cluster.check(ids, commands=2)
    assert cluster.effects(ids[0]) == ["begin-0", "end-0", "begin-1", "end-1"]
    await cluster.close_workspaces(ids)
    await until(lambda: not containers(ids[0]))


def containers(conversation_id: str) -> list[str]:
    label = f"label=deckhands.conversation={conversation_id}"
    listed = ["docker", "ps", "--all", "--quiet", "--filter", label]
    return subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
