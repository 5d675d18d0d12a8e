"""A controller worker killed at every boundary: another continues, and nothing is lost, repeated or blamed."""

from __future__ import annotations

import pytest

from tests.faults.harness import FaultCluster, steps

FAILPOINTS = [
    *("after_claim:kill@1", "before_append:kill@3", "after_append:kill@1", "before_release:kill@1"),
    *(
        pytest.param(failpoint, marks=pytest.mark.soak)
        for failpoint in (
            *("before_claim:kill@1", "before_append:kill@1", "after_append:kill@3", "model_thinking:kill@1"),
            *("before_snapshot:kill@1", "after_snapshot:kill@1"),
        )
    ),
    # The same places at other steps; tests/simulation kills at every step of a conversation.
    *(
        pytest.param(f"{place}:kill@{hit}", marks=pytest.mark.slow)
        for place, hit in (
            *(("before_append", 2), ("before_append", 5), ("after_append", 2), ("after_append", 5)),
            ("model_thinking", 3),
        )
    ),
]


@pytest.mark.parametrize("failpoint", FAILPOINTS)
async def test_conversation_survives_a_kill_at(cluster: FaultCluster, failpoint: str) -> None:
    cluster.start_tool()
    cluster.start_controller("victim", DECKHANDS_FAILPOINTS=f"controller.{failpoint}")
    ids = await cluster.submit(steps(3))
    assert await cluster.until_ended("victim") == -9
    cluster.start_controller("survivor")
    await cluster.check(ids, commands=3)


async def test_kill_during_a_model_call_repeats_and_pays_once(cluster: FaultCluster) -> None:
    cluster.start_tool()
    cluster.start_controller("victim")
    ids = await cluster.submit(steps(2), latency=1.5)
    await cluster.until_kind(ids[0], "observation.recall")
    cluster.kill("victim")
    cluster.start_controller("survivor")
    await cluster.check(ids, commands=2)
    replies = [event for event in await cluster.client.events(ids[0]) if event.kind == "model.reply"]
    assert [reply.iteration for reply in replies] == [1, 2, 3]


async def test_a_damaged_snapshot_only_costs_time(cluster: FaultCluster) -> None:
    cluster.start_tool()
    cluster.start_controller("victim", DECKHANDS_FAILPOINTS="controller.before_append:kill@6")
    ids = await cluster.submit(steps(4))
    await cluster.until_ended("victim")
    store = cluster.client.store
    await store.connection.call("SET", store.known_keys(ids[0]).snapshot, b"\x01half a snapshot")
    cluster.start_controller("survivor")
    await cluster.check(ids, commands=4)
