"""Delegates whose worker or whose parent's worker dies: every result is reported once, nothing runs twice."""

from __future__ import annotations

from typing import Any

import pytest

from broker.contract.actions import AgentDelegateAction
from broker.contract.agent_state import AgentState
from broker.contract.events import AgentSpec, DelegateEnded, LLMSpec
from broker.contract.observations import AgentDelegateObservation
from broker.log.status import fold_status
from broker.runtime.ids import make_delegate_id
from tests.faults.harness import FaultCluster, steps
from tests.turns import bash, call, finish

ONE_EACH = {"DECKHANDS_MAX_CONVERSATIONS": "1"}


def delegate_call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": "delegate", "arguments": {"agent": name, "task": f"do part {name}", **arguments}}


def part(cluster: FaultCluster, name: str, *, count: int, seconds: float) -> AgentSpec:
    """An agent that leaves its own traces in the shared workspace, then reports its name."""
    turns: list[dict[str, Any]] = []
    for n in range(count):
        command = f"echo begin-{name}-{n} >> effects; sleep {seconds}; echo end-{name}-{n} >> effects"
        turns.append(bash(command))
    turns.append(finish(f"part {name} is done"))
    return AgentSpec(llm=LLMSpec(model=cluster.script(*turns, latency=0.1)))


async def begin(cluster: FaultCluster, calls: list[dict[str, Any]], **parts: AgentSpec) -> str:
    turns = [{"text": "Three at once.", "tool_calls": calls}, finish("all parts are done")]
    (cid,) = await cluster.submit(turns, enable_delegation=True, delegates=parts)
    return cid


async def delegates_of(cluster: FaultCluster, cid: str, count: int) -> list[str]:
    """Wait until the parent has asked for its delegates; return their ids, and note where they work."""

    async def asked() -> bool:
        return len([e for e in await cluster.client.events(cid) if isinstance(e, AgentDelegateAction)]) == count

    await cluster.until(asked, what="delegate actions")
    actions = [e.id for e in await cluster.client.events(cid) if isinstance(e, AgentDelegateAction)]
    ids = [make_delegate_id(cid, action_id) for action_id in actions]
    for delegate_id in ids:
        (cluster.root / f"{delegate_id}.where").write_text((cluster.root / f"{cid}.where").read_text())
    return ids


async def check_results(cluster: FaultCluster, cid: str, *, count: int) -> None:
    """Each delegate reported once, and its report is in the log once, as the answer to its action."""
    events = await cluster.client.events(cid)
    results = [event for event in events if isinstance(event, AgentDelegateObservation)]
    assert sorted(str(one.outputs["result"]) for one in results) == [f"part {name} is done" for name in "abc"[:count]]
    assert [one.cause for one in results] == [one.delegate_id for one in results]
    assert len([event for event in events if isinstance(event, DelegateEnded)]) == count


@pytest.mark.parametrize(
    "place", ["before_report", *(pytest.param(p, marks=pytest.mark.soak) for p in ("delegate_begun", "after_report"))]
)
async def test_delegate_starts_and_reports_once_despite_worker_death(cluster: FaultCluster, place: str) -> None:
    cluster.start_tool()
    cluster.start_controller("victim", DECKHANDS_FAILPOINTS=f"controller.{place}:kill@1")
    cid = await begin(cluster, [delegate_call("a")], a=part(cluster, "a", count=1, seconds=0.1))
    assert await cluster.until_ended("victim") == -9
    cluster.start_controller("survivor")
    ids = await delegates_of(cluster, cid, 1)
    await cluster.check([cid, *ids], commands=1)
    await check_results(cluster, cid, count=1)


async def test_a_cancel_goes_down_the_tree(cluster: FaultCluster) -> None:
    cluster.start_tool()
    cluster.start_controller("c1")
    parts = {"a": part(cluster, "a", count=1, seconds=600)}
    cid = await begin(cluster, [delegate_call("a")], **parts)
    (delegate_id,) = await delegates_of(cluster, cid, 1)
    await cluster.until(lambda: "begin-a-0" in cluster.effects(cid), what="work")
    await cluster.client.pause(cid)
    await cluster.until_kind(delegate_id, "action.change_agent_state")
    await cluster.client.cancel(cid)

    async def is_stopped() -> bool:
        return fold_status(await cluster.client.events(delegate_id)).state is AgentState.STOPPED

    await cluster.until(is_stopped, what="the delegate's stop")
    await cluster.settle([cid, delegate_id])
    assert "end-a-0" not in cluster.effects(cid)


async def test_background_delegate_is_reported_when_it_ends(cluster: FaultCluster) -> None:
    cluster.start_tool()
    cluster.start_controller("c1")
    parts = {"a": part(cluster, "a", count=1, seconds=0.1)}
    slow = {
        "name": "execute_bash",
        "arguments": {"command": "until grep -q end-a-0 effects; do sleep 0.1; done; sleep 1"},
    }
    turns = [
        {"tool_calls": [delegate_call("a", background=True)]},
        {"tool_calls": [slow]},
        call("think", thought="it is there"),
        finish(),
    ]
    (cid,) = await cluster.submit(turns, enable_delegation=True, delegates=parts)
    ids = await delegates_of(cluster, cid, 1)
    await cluster.check([cid, *ids], commands=1)
    (result,) = [e for e in await cluster.client.events(cid) if isinstance(e, AgentDelegateObservation)]
    assert (result.cause, result.outputs) == (None, {"result": "part a is done"})


async def test_two_hundred_delegates_of_a_killed_parent_report_once(cluster: FaultCluster) -> None:
    """The parent's worker dies when all of a turn have started; they end before another one takes over."""
    helper = AgentSpec(llm=LLMSpec(model=cluster.script(finish("found"))), enable_workspace_skills=False)
    calls = [delegate_call("helper", task=f"look at {n}") for n in range(200)]
    turns = [{"tool_calls": calls[:128]}, {"tool_calls": calls[128:]}, finish("found")]
    cluster.start_controller("victim", **ONE_EACH, DECKHANDS_FAILPOINTS="controller.delegate_begun:kill@128")
    (cid,) = await cluster.submit(
        turns, enable_delegation=True, enable_workspace_skills=False, delegates={"helper": helper}
    )
    assert await cluster.until_ended("victim") == -9
    for name in ("c1", "c2"):
        cluster.start_controller(name)
    await cluster.settle([cid], limit=120.0)
    await cluster.check([cid], commands=0)
    events = await cluster.client.events(cid)
    asked = [event.id for event in events if isinstance(event, AgentDelegateAction)]
    results = [event for event in events if isinstance(event, AgentDelegateObservation)]
    assert len(asked) == 200
    assert sorted(event.cause or 0 for event in results) == asked
    assert all(event.outputs == {"result": "found"} for event in results)
    delegates = [make_delegate_id(cid, action_id) for action_id in asked]
    await cluster.settle(delegates)
    assert len([event for event in events if isinstance(event, DelegateEnded)]) == 200


async def test_a_delegate_has_the_demand_of_its_parent(cluster: FaultCluster) -> None:
    helper = AgentSpec(llm=LLMSpec(model=cluster.script(*steps(1))))
    cluster.start()
    turns = [call("delegate", agent="helper", task="count"), finish()]
    (parent,) = await cluster.submit(turns, enable_delegation=True, delegates={"helper": helper}, task={"acks": "disk"})
    await cluster.settle([parent])
    ids = [row.conversation_id for row in await cluster.client.recent()]
    assert len(ids) == 2
    assert [await cluster.client.log.load_acks(conversation_id) for conversation_id in ids] == ["disk", "disk"]
