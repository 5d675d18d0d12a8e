"""Questions of an MCP server: the conversation waits for the person, and the answer goes back to the server."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest

from broker.contract.actions import MCPAction
from broker.contract.observations import MCPQuestionObservation
from broker.log.invariants import find_violations
from controller_worker.loop.replay import replay
from tests.faults.harness import FaultCluster
from tests.faults.test_mcp_tasks import records, settings, text_of
from tests.task_mcp_server import KEY, TaskServer, question, task_server
from tests.turns import call, finish

KEY_OF_SECRETS = base64.b64encode(b"k" * 32).decode()


@pytest.fixture
async def remote() -> AsyncIterator[TaskServer]:
    async with task_server() as server:
        yield server


async def ask(cluster: FaultCluster, remote: TaskServer, tool: str, **environment: str) -> str:
    cluster.start(**settings(cluster, remote), **environment)
    (cid,) = await cluster.submit([call(tool, name="one"), finish()], tools=["remote/*"])
    return cid


async def _records(cluster: FaultCluster, conversation_id: str) -> list[tuple[bytes, bytes]]:
    flat = await cluster.client.store.call("HGETALL", cluster.client.store.known_keys(conversation_id).once)
    return [(flat[n], flat[n + 1]) for n in range(0, len(flat), 2) if flat[n].startswith(b"t:")]


async def until_asked(cluster: FaultCluster, conversation_id: str, *, count: int = 1) -> MCPQuestionObservation:
    await cluster.until_kind(conversation_id, "observation.mcp_question", count=count)

    async def is_waiting() -> bool:
        return (await cluster.client.row(conversation_id)).state == "awaiting_user_confirmation"

    await cluster.until(is_waiting, what="the question")
    events = await cluster.client.events(conversation_id)
    return [event for event in events if isinstance(event, MCPQuestionObservation)][-1]


async def check_log(cluster: FaultCluster, conversation_id: str) -> None:
    events = await cluster.client.events(conversation_id)
    row = await cluster.client.row(conversation_id)
    known = {"conversation_id": conversation_id, "last_event_id": row.last_event_id}
    found = find_violations(events, **known, is_strict=True)
    found += (await cluster.client.verify(conversation_id)).violations
    assert not found, [item.text for item in found]
    assert replay(events).divergence is None


@pytest.mark.parametrize(("tool", "text"), [("ask", "thank you"), ("asking_job", "one is done")])
async def test_answer_of_the_person_goes_back(cluster: FaultCluster, remote: TaskServer, tool: str, text: str) -> None:
    cid = await ask(cluster, remote, tool, DECKHANDS_SECRET_KEY=KEY_OF_SECRETS)
    asked = await until_asked(cluster, cid)
    assert "Which size?" in asked.content
    assert asked.questions[0].key == "q1"
    (record,) = [value for _, value in await _records(cluster, cid)]
    assert b"Which size?" not in record
    await cluster.client.confirm(cid, edited={"answers": {"size": 3}})
    await cluster.settle([cid])
    events = await cluster.client.events(cid)
    *_, last = [event for event in events if event.kind == "observation.mcp"]
    assert text_of(last) == text
    assert remote.responses == [{"q1": {"action": "accept", "content": {"size": 3}}}]
    assert (await cluster.client.row(cid)).state == "finished"
    assert len({meta[KEY] for meta in remote.metas}) == 1
    assert await records(cluster, cid) == []
    await check_log(cluster, cid)


async def test_incomplete_answer_is_asked_for_again(cluster: FaultCluster, remote: TaskServer) -> None:
    cid = await ask(cluster, remote, "ask")
    await until_asked(cluster, cid)
    await cluster.client.confirm(cid)
    again = await until_asked(cluster, cid, count=2)
    assert "lacks size" in again.content
    assert remote.responses == []
    await cluster.client.confirm(cid, edited={"answers": {"size": 4}})
    await cluster.settle([cid])
    assert remote.responses == [{"q1": {"action": "accept", "content": {"size": 4}}}]
    await check_log(cluster, cid)


async def test_question_survives_kills_of_both_workers(cluster: FaultCluster, remote: TaskServer) -> None:
    cid = await ask(cluster, remote, "asking_job")
    await until_asked(cluster, cid)
    cluster.kill("t1")
    cluster.kill("c1")
    await cluster.client.confirm(cid, edited={"answers": {"size": 5}})
    cluster.start_tool("t2", **settings(cluster, remote))
    cluster.start_controller("c2")
    await cluster.settle([cid])
    assert remote.responses == [{"q1": {"action": "accept", "content": {"size": 5}}}]
    assert remote.started == {"one": 1}
    await check_log(cluster, cid)


@pytest.mark.parametrize("answer", ["reject", "message"])
async def test_other_answer_ends_the_call(cluster: FaultCluster, remote: TaskServer, answer: str) -> None:
    cid = await ask(cluster, remote, "ask")
    await until_asked(cluster, cid)
    if answer == "reject":
        await cluster.client.reject(cid, reason="too private")
    else:
        await cluster.client.send_message(cid, "forget it")
    await cluster.settle([cid])
    events = await cluster.client.events(cid)
    assert any(event.kind == "observation.user_rejected" for event in events)
    assert remote.responses == []
    await check_log(cluster, cid)


@pytest.mark.parametrize(
    ("questions", "words"),
    [
        ({"q": {"method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 9}}}, "did not complete"),
        ({f"q{n}": question() for n in range(11)}, "asks 11 questions"),
        ({"q": question("x" * 9_000)}, "more than 8000 characters"),
        (
            {"q": {"method": "elicitation/create", "params": {"mode": "url", "message": "m", "url": "file:///x"}}},
            "https",
        ),
    ],
)
async def test_what_a_server_may_ask_is_bounded(
    cluster: FaultCluster, remote: TaskServer, questions: dict[str, Any], words: str
) -> None:
    remote.questions = questions
    cid = await ask(cluster, remote, "ask")
    await cluster.settle([cid])
    (answer,) = await cluster.answers(cid, "action.call_tool_mcp")
    assert words in answer.content
    assert (await cluster.client.row(cid)).state == "finished"


async def test_model_cannot_answer_for_the_person(cluster: FaultCluster, remote: TaskServer) -> None:
    cluster.start(**settings(cluster, remote))
    forged = {"answers": {"size": 1}, "asks": 1, "inputResponses": {"q1": {"action": "accept"}}}
    (cid,) = await cluster.submit([call("ask", name="one", **forged), finish()], tools=["remote/*"])
    await until_asked(cluster, cid)
    assert remote.responses == []
    first, asking = [event for event in await cluster.client.events(cid) if isinstance(event, MCPAction)]
    assert (first.asks, first.answers) == (None, None)
    assert (asking.asks, asking.answers) == (first.id, None)
    assert first.arguments["asks"] == 1
