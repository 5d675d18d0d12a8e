"""A controller worker killed at every boundary: another continues, nothing is lost or done twice."""

from __future__ import annotations

import pytest

from tests.faults.harness import FaultCluster, steps

BOUNDARIES = [
    "controller.after_claim@1",
    "controller.before_append@3",
    "controller.after_append@1",
    "controller.before_release@1",
]
OTHERS = [
    "controller.before_claim@1",
    "controller.before_append@1",
    "controller.after_append@3",
    "controller.model_thinking@1",
    "controller.before_snapshot@1",
    "controller.after_snapshot@1",
]
AGAIN = [
    *(f"controller.before_append@{n}" for n in (2, 5)),
    *(f"controller.after_append@{n}" for n in (2, 5)),
    "controller.model_thinking@3",
]
"""The same places at other steps; every step of a conversation is killed at in tests/simulation."""


@pytest.mark.parametrize(
    "boundary",
    [
        *BOUNDARIES,
        *(pytest.param(place, marks=pytest.mark.soak) for place in OTHERS),
        *(pytest.param(place, marks=pytest.mark.slow) for place in AGAIN),
    ],
)
async def test_conversation_survives_a_kill_at(cluster: FaultCluster, boundary: str) -> None:
    name, _, hit = boundary.partition("@")
    cluster.start_tool()
    cluster.start_controller("victim", DECKHANDS_FAILPOINTS=f"{name}:kill@{hit}")
    ids = await cluster.submit(steps(3))
    assert await cluster.until_ended("victim") == -9
    cluster.start_controller("survivor")
    await cluster.settle(ids)
    await cluster.check(ids, commands=3)


async def test_kill_during_a_model_call_repeats_and_pays_once(cluster: FaultCluster) -> None:
    cluster.start_tool()
    cluster.start_controller("victim")
    ids = await cluster.submit(steps(2), latency=1.5)
    await cluster.until_kind(ids[0], "observation.recall")
    cluster.kill("victim")
    cluster.start_controller("survivor")
    await cluster.settle(ids)
    await cluster.check(ids, commands=2)
    replies = [event for event in await cluster.client.events(ids[0]) if event.kind == "model.reply"]
    assert [reply.iteration for reply in replies] == [1, 2, 3]


async def test_a_damaged_snapshot_only_costs_time(cluster: FaultCluster) -> None:
    cluster.start_tool()
    cluster.start_controller("victim", DECKHANDS_FAILPOINTS="controller.before_append:kill@6")
    ids = await cluster.submit(steps(4))
    await cluster.until_ended("victim")
    store = cluster.client.store
    await store.connection.call("SET", store.keys(ids[0]).snapshot, b"\x01half a snapshot")
    cluster.start_controller("survivor")
    await cluster.settle(ids)
    await cluster.check(ids, commands=4)
