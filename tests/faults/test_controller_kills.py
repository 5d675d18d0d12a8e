"""A controller worker killed at every boundary: another continues, and nothing is lost, repeated or blamed."""

from __future__ import annotations

from collections import Counter

import pytest

from broker.log.conversations import Conversations
from tests.faults.harness import FaultCluster, steps
from tests.turns import bash, finish

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
    await store.connection.call("SET", store.keys(ids[0]).snapshot, b"\x01half a snapshot")
    cluster.start_controller("survivor")
    await cluster.check(ids, commands=4)


HELD = 12
DEATHS = 5


async def held(cluster: FaultCluster) -> list[str]:
    """Start conversations whose command ends at `let_go`, and wait until all run."""
    command = "echo begin >> effects; until [ -e go ]; do sleep 0.1; done; echo end >> effects"
    ids = await cluster.submit([bash(command, timeout=600), finish("all done")], count=HELD)
    await cluster.until(lambda: all(cluster.effects(cid) == ["begin"] for cid in ids))
    return ids


async def let_go(cluster: FaultCluster, ids: list[str]) -> None:
    """Let the commands end, and check that each ran once and was answered, and that its agent has finished."""
    for cid in ids:
        (cluster.folder_of(cid) / "go").touch()
    await cluster.settle(ids)
    for cid in ids:
        assert (await cluster.client.row(cid)).state == "finished"
        assert [e.kind for e in await cluster.client.events(cid) if e.cause is not None][-1] == "observation.run"
        assert cluster.effects(cid) == ["begin", "end"]


@pytest.mark.soak
async def test_commands_outlive_any_number_of_tool_workers(cluster: FaultCluster) -> None:
    cluster.start_controller()
    cluster.start_tool("t0")
    ids = await held(cluster)
    for death in range(DEATHS):
        cluster.kill(f"t{death}")
        cluster.start_tool(f"t{death + 1}")

        async def are_taken_over(times: int = death + 1) -> bool:
            takeovers = await Conversations(cluster.client.store).list_takeovers()
            return Counter(one.conversation_id for one in takeovers if one.action_id) == dict.fromkeys(ids, times)

        await cluster.until(are_taken_over, what=f"takeover {death + 1}")
    await let_go(cluster, ids)


@pytest.mark.soak
async def test_conversations_outlive_controllers_that_die_while_they_take_them_over(cluster: FaultCluster) -> None:
    cluster.start_tool()
    cluster.start_controller("c0")
    ids = await held(cluster)
    cluster.kill("c0")
    for death in range(1, DEATHS):
        cluster.start_controller(f"c{death}", DECKHANDS_FAILPOINTS=f"controller.after_claim:kill@{2 * death + 1}")
        assert await cluster.until_ended(f"c{death}") == -9
    cluster.start_controller("last")
    await let_go(cluster, ids)
