"""A conversation that waits for a confirmation: everything dies, and the confirmed action still runs exactly once."""

from __future__ import annotations

import signal

import pytest

from broker.contract.policies import ConfirmationPolicy
from tests.faults.harness import FaultCluster, steps

ALWAYS = ConfirmationPolicy(mode="always")


async def until_asked(cluster: FaultCluster, conversation_id: str, *, times: int) -> None:
    async def is_asked() -> bool:
        states = [
            event.agent_state.value
            for event in await cluster.client.events(conversation_id)
            if hasattr(event, "agent_state")
        ]
        return states.count("awaiting_user_confirmation") >= times and states[-1] == "awaiting_user_confirmation"

    await cluster.until(is_asked, what=f"question {times}")


async def test_the_question_survives_the_death_of_everything(durable_cluster: FaultCluster) -> None:
    cluster = durable_cluster
    cluster.start_controller("c1")
    cluster.start_tool("t1")
    (cid,) = await cluster.submit(steps(2), confirmation=ALWAYS)
    await until_asked(cluster, cid, times=1)
    cluster.kill("c1")
    cluster.kill("t1")
    cluster.store.child.send(signal.SIGKILL)
    await cluster.store.child.wait()
    await cluster.store.start()
    assert cluster.effects(cid) == []
    cluster.start_controller("c2")
    cluster.start_tool("t2")
    await cluster.client.confirm(cid)
    await until_asked(cluster, cid, times=2)
    assert cluster.effects(cid) == ["begin-0", "end-0"]
    await cluster.client.confirm(cid)
    await cluster.settle([cid])
    await cluster.check([cid], commands=2)


@pytest.mark.parametrize(
    "boundary", ["controller.after_append@3", pytest.param("controller.before_append@3", marks=pytest.mark.slow)]
)
async def test_a_controller_that_dies_with_the_answer_runs_it_once(cluster: FaultCluster, boundary: str) -> None:
    name, _, hit = boundary.partition("@")
    cluster.start_tool()
    cluster.start_controller("victim", DECKHANDS_FAILPOINTS=f"{name}:kill@{hit}")
    (cid,) = await cluster.submit(steps(1), confirmation=ALWAYS)
    await until_asked(cluster, cid, times=1)
    await cluster.client.confirm(cid)
    await cluster.until_ended("victim")
    cluster.start_controller("survivor")
    await cluster.settle([cid])
    await cluster.check([cid], commands=1)
    assert cluster.effects(cid) == ["begin-0", "end-0"]


async def test_a_rejected_action_never_runs(cluster: FaultCluster) -> None:
    cluster.start_tool()
    cluster.start_controller()
    (cid,) = await cluster.submit(steps(1), confirmation=ALWAYS)
    await until_asked(cluster, cid, times=1)
    await cluster.client.reject(cid)
    await cluster.settle([cid])
    await cluster.check([cid], commands=0, state="awaiting_user_input")
    assert cluster.effects(cid) == []
