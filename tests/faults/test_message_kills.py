"""Messages that come while the agent works, and a controller worker that is killed in the middle of what they do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker.contract.double_texting import find_rolled_back
from broker.contract.observations import CmdOutputObservation, ErrorObservation
from broker.runtime.errors import ConversationBusy
from controller_worker.loop.replay import replay
from deckhands.client.tasks.spec import TaskSpec
from tests.faults.harness import FaultCluster, steps

PLACES = ("before_append", "after_append")


async def submit(cluster: FaultCluster, policy: str, *, seconds: float) -> str:
    """Begin a conversation whose first command takes so long, and wait until it runs."""
    script = cluster.root / "script.json"
    script.write_text(json.dumps({"description": "fault test", "turns": steps(1, seconds=seconds)}))
    folder = cluster.root / "work" / "w"
    folder.mkdir(parents=True)
    options: dict[str, Any] = {"model": f"scripted/{script}", "workspace": {"path": str(folder), "sandbox": "none"}}
    request = TaskSpec.parse({"task": "do it", "double_texting": policy, **options})
    conversation_id = await cluster.client.submit(request)
    (cluster.root / f"{conversation_id}.where").write_text(str(folder))
    await cluster.until(lambda: "begin-0" in cluster.effects(conversation_id), what="a running command")
    return conversation_id


@pytest.mark.parametrize(
    ("policy", "place"),
    [
        ("interrupt", "before_append"),
        ("rollback", "after_append"),
        *(
            pytest.param(policy, place, marks=pytest.mark.soak)
            for policy, place in [
                ("interrupt", "after_append"),
                ("rollback", "before_append"),
                ("enqueue", "before_append"),
                ("enqueue", "after_append"),
            ]
        ),
    ],
)
async def test_another_worker_completes_what_a_message_has_begun(
    cluster: FaultCluster, policy: str, place: str
) -> None:
    cluster.start_tool(NO_CHANGE_TIMEOUT_SECONDS="3600")  # on a busy machine, silence must not answer the command
    cluster.start_controller("first")
    seconds = 2.0 if policy == "enqueue" else 3600.0
    conversation_id = await submit(cluster, policy, seconds=seconds)
    cluster.kill("first")
    await cluster.client.send_message(conversation_id, "something else")
    # Its first append is what the message wants.
    cluster.start_controller("victim", DECKHANDS_FAILPOINTS=f"controller.{place}:kill@1")
    assert await cluster.until_ended("victim") == -9
    cluster.start_controller("survivor")
    await cluster.settle([conversation_id])
    await cluster.check([conversation_id], commands=int(policy == "enqueue"))
    events = await cluster.client.events(conversation_id)
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
    conversation_id = await submit(cluster, "reject", seconds=2.0)
    cluster.kill("victim")
    with pytest.raises(ConversationBusy):
        await cluster.client.send_message(conversation_id, "something else")
    cluster.start_controller("survivor")
    await cluster.settle([conversation_id])
    await cluster.check([conversation_id], commands=1)
    kinds = [event.kind for event in await cluster.client.events(conversation_id)]
    assert kinds.count("action.message") == 1
    await cluster.client.send_message(conversation_id, "something else")
    await cluster.settle([conversation_id])
