"""Requests of users, checks and critics while workers die: each takes effect once, and as requested."""

from __future__ import annotations

import pytest

from broker.contract.double_texting import find_rolled_back
from broker.contract.notes import NotebookKey, NoteObservation
from broker.contract.observations import CmdOutputObservation, ErrorObservation, FinishVerdictObservation
from broker.contract.policies import ConfirmationPolicy
from broker.contract.specs import CriticSpec, GoalSpec, MemorySpec
from broker.coordination.notebooks import Notebooks
from broker.runtime.errors import ConversationBusy
from controller_worker.loop.replay import replay
from tests.faults.harness import FaultCluster, steps
from tests.turns import call, finish

ALWAYS = ConfirmationPolicy(mode="always")


# Messages while the agent works


async def submit(cluster: FaultCluster, policy: str, *, seconds: float) -> str:
    """Start a conversation whose first command takes so long, and wait until it runs."""
    (cid,) = await cluster.submit(steps(1, seconds=seconds), task={"double_texting": policy})
    await cluster.until(lambda: "begin-0" in cluster.effects(cid), what="a running command")
    return cid


@pytest.mark.parametrize(
    ("policy", "place"),
    [
        ("interrupt", "before_append"),
        ("rollback", "after_append"),
        pytest.param("interrupt", "after_append", marks=pytest.mark.soak),
        pytest.param("rollback", "before_append", marks=pytest.mark.soak),
        pytest.param("enqueue", "before_append", marks=pytest.mark.soak),
        pytest.param("enqueue", "after_append", marks=pytest.mark.soak),
    ],
)
async def test_another_worker_completes_what_a_message_has_begun(
    cluster: FaultCluster, policy: str, place: str
) -> None:
    cluster.start_tool(NO_CHANGE_TIMEOUT_SECONDS="3600")  # on a busy machine, silence must not answer the command
    cluster.start_controller("first")
    cid = await submit(cluster, policy, seconds=2.0 if policy == "enqueue" else 3600.0)
    cluster.kill("first")
    await cluster.client.send_message(cid, "something else")
    # Its first append is the reaction to the message.
    cluster.start_controller("victim", DECKHANDS_FAILPOINTS=f"controller.{place}:kill@1")
    assert await cluster.until_ended("victim") == -9
    cluster.start_controller("survivor")
    await cluster.check([cid], commands=int(policy == "enqueue"))
    events = await cluster.client.events(cid)
    kinds = [event.kind for event in events]
    assert kinds.count("observation.interrupted") == (policy == "interrupt")
    assert kinds.count("observation.rolled_back") == (policy == "rollback")
    (command,) = [event.id for event in events if event.kind == "action.run"]
    (answer,) = [event for event in events if event.cause == command]
    assert isinstance(answer, CmdOutputObservation if policy == "enqueue" else ErrorObservation)
    assert (command in find_rolled_back(events)) == (policy == "rollback")
    assert replay(events).divergence is None


async def test_a_message_that_is_refused_leaves_nothing_whatever_dies(cluster: FaultCluster) -> None:
    cluster.start_tool()
    cluster.start_controller("victim")
    cid = await submit(cluster, "reject", seconds=2.0)
    cluster.kill("victim")
    with pytest.raises(ConversationBusy):
        await cluster.client.send_message(cid, "something else")
    cluster.start_controller("survivor")
    await cluster.check([cid], commands=1)
    assert [event.kind for event in await cluster.client.events(cid)].count("action.message") == 1
    await cluster.client.send_message(cid, "something else")
    await cluster.settle([cid])


# Confirmations


async def until_asked(cluster: FaultCluster, conversation_id: str, *, times: int) -> None:
    async def is_asked() -> bool:
        events = await cluster.client.events(conversation_id)
        states = [event.agent_state.value for event in events if hasattr(event, "agent_state")]
        return states.count("awaiting_user_confirmation") >= times and states[-1] == "awaiting_user_confirmation"

    await cluster.until(is_asked, what=f"question {times}")


async def test_the_question_survives_the_death_of_everything(durable_cluster: FaultCluster) -> None:
    cluster = durable_cluster
    cluster.start()
    (cid,) = await cluster.submit(steps(2), confirmation=ALWAYS)
    await until_asked(cluster, cid, times=1)
    cluster.kill("c1")
    cluster.kill("t1")
    await cluster.restart_store()
    assert cluster.effects(cid) == []
    cluster.start()
    await cluster.client.confirm(cid)
    await until_asked(cluster, cid, times=2)
    assert cluster.effects(cid) == ["begin-0", "end-0"]
    await cluster.client.confirm(cid)
    await cluster.check([cid], commands=2)


@pytest.mark.parametrize("place", ["after_append", pytest.param("before_append", marks=pytest.mark.slow)])
async def test_a_controller_that_dies_with_the_answer_runs_it_once(cluster: FaultCluster, place: str) -> None:
    cluster.start_tool()
    cluster.start_controller("victim", DECKHANDS_FAILPOINTS=f"controller.{place}:kill@3")
    (cid,) = await cluster.submit(steps(1), confirmation=ALWAYS)
    await until_asked(cluster, cid, times=1)
    await cluster.client.confirm(cid)
    await cluster.until_ended("victim")
    cluster.start_controller("survivor")
    await cluster.check([cid], commands=1)
    assert cluster.effects(cid) == ["begin-0", "end-0"]


async def test_a_rejected_action_never_runs(cluster: FaultCluster) -> None:
    cluster.start()
    (cid,) = await cluster.submit(steps(1), confirmation=ALWAYS)
    await until_asked(cluster, cid, times=1)
    await cluster.client.reject(cid)
    await cluster.check([cid], commands=0, state="awaiting_user_input")
    assert cluster.effects(cid) == []


# Goals, critics and notes


@pytest.mark.parametrize(
    ("failpoint", "written"),
    [("after_append:kill@3", 0), pytest.param("before_append:kill@4", 1, marks=pytest.mark.slow)],
)
async def test_a_worker_dies_before_and_after_the_notebook_is_written(
    cluster: FaultCluster, failpoint: str, written: int
) -> None:
    """Its appends are the greeting, the recall, the turn with the note, and the result of the note."""
    cluster.start_controller("victim", DECKHANDS_FAILPOINTS=f"controller.{failpoint}")
    turns = [call("note", command="write", text="Use make."), finish()]
    (cid,) = await cluster.submit(turns, memory=MemorySpec(project="engine"), goal=GoalSpec(critic=CriticSpec()))
    assert await cluster.until_ended("victim") == -9
    notebooks, book = Notebooks(cluster.client.store), NotebookKey("", "", "engine")
    assert len(await notebooks.read(book)) == written
    cluster.start_controller("survivor")
    await cluster.check([cid], commands=0)
    events = await cluster.client.events(cid)
    (noted,) = (event for event in events if isinstance(event, NoteObservation))
    assert await notebooks.read(book) == (noted.written,)
    assert len([event for event in events if isinstance(event, FinishVerdictObservation)]) == 1
