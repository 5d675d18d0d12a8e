"""Two directories under one node's name: the second worker does not begin, and nothing is lost to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.coordination.membership import ClusterMember
from tests.faults.conftest import cluster  # noqa: F401  (a fixture)
from tests.faults.harness import FaultCluster, steps
from tool_worker.workspace.node_identity import find_worker_elsewhere, read_or_create_identity


async def test_a_worker_of_another_directory_does_not_begin(cluster: FaultCluster) -> None:  # noqa: F811
    cluster.start_controller()
    cluster.start_tool("first")
    (cid,) = await cluster.submit(steps(1))
    await cluster.settle([cid])
    cluster.start_tool("second", DECKHANDS_NODE_DIR=str(cluster.root / "elsewhere"))
    assert await cluster.until_ended("second") == 70
    said = cluster.log_of("second")
    assert "The node 'node1' is served from another directory, by tool-" in said
    assert "Give this worker another DECKHANDS_NODE, or the same DECKHANDS_NODE_DIR." in said
    assert "Traceback" not in said
    cluster.kill("first")
    cluster.start_tool("successor")  # in the same directory, at once
    more = await cluster.submit(steps(1))
    await cluster.settle(more)
    await cluster.check([cid, *more], commands=1)


def test_a_directory_keeps_its_identity(tmp_path: Path) -> None:
    identity = read_or_create_identity(tmp_path / "a")
    assert identity
    assert read_or_create_identity(tmp_path / "a") == identity != read_or_create_identity(tmp_path / "b")
    (tmp_path / "file").write_text("")
    assert read_or_create_identity(tmp_path / "file") == ""


@pytest.mark.parametrize(
    ("role", "node", "directory", "left_seconds", "is_double"),
    [
        ("tool", "n1", "other", 1.0, True),
        ("tool", "n1", "mine", 1.0, False),
        ("tool", "n2", "other", 1.0, False),
        ("tool", "n1", "other", -1.0, False),
        ("tool", "n1", "", 1.0, False),
        ("controller", "n1", "other", 1.0, False),
    ],
)
def test_who_is_a_double(role: str, node: str, directory: str, left_seconds: float, is_double: bool) -> None:
    member = ClusterMember("tool-1", role, left_seconds, {"node": node, "directory": directory})
    assert (find_worker_elsewhere([member], "n1", "mine") is member) is is_double
    assert find_worker_elsewhere([member], "n1", "") is None
