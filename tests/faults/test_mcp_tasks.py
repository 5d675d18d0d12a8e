"""Calls that an MCP server makes tasks of: each ends once, whatever is killed or away meanwhile."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest

from broker.contract.actions import MCPAction
from broker.contract.agent_state import AgentState
from broker.contract.events import Observation
from broker.contract.observations import MCPObservation, OutcomeUnknownObservation
from tests.faults.harness import FaultCluster
from tests.polling import unhurried, until
from tests.task_mcp_server import KEY, TaskServer
from tests.turns import bash, call, finish


def settings(cluster: FaultCluster, remote: TaskServer, **changes: Any) -> dict[str, str]:
    path = cluster.root / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"remote": {"url": remote.url, **changes}}}))
    return {"DECKHANDS_MCP": str(path)}


async def records(cluster: FaultCluster, conversation_id: str) -> list[bytes]:
    once = cluster.client.store.known_keys(conversation_id).once
    return [name for name in await cluster.client.store.call("HKEYS", once) if name.startswith(b"t:")]


def text_of(observation: Any) -> str:
    assert isinstance(observation, MCPObservation), observation
    return str(json.loads(observation.content)["content"][0]["text"])


@pytest.mark.parametrize(
    ("failpoint", "tool", "is_known"),
    [
        ("tool.task_recorded", "job", True),
        ("tool.task_created", "job", False),
        ("tool.task_created", "keyed_job", True),
        ("tool.after_result", "job", True),
    ],
)
async def test_killed_call_continues_with_its_task(
    cluster: FaultCluster, remote: TaskServer, failpoint: str, tool: str, is_known: bool
) -> None:
    environment = settings(cluster, remote)
    cluster.start_controller()
    cluster.start_tool("victim", **environment, DECKHANDS_FAILPOINTS=f"{failpoint}:kill@1")
    (cid,) = await cluster.submit([call(tool, name="one", seconds=0.3), finish()], tools=["remote/*"])
    assert await cluster.until_ended("victim", limit=60) == -9
    cluster.start_tool("survivor", **environment)
    await cluster.settle([cid])
    (answer,) = await cluster.answers(cid, "action.call_tool_mcp")
    if is_known:
        assert text_of(answer) == "one is done"
    else:
        assert isinstance(answer, OutcomeUnknownObservation)
    assert remote.started == {"one": 1}
    await until(lambda: _is_empty(cluster, cid), what="the end of the record")


async def test_call_carries_its_key_and_its_trace(cluster: FaultCluster, remote: TaskServer) -> None:
    cluster.start(**settings(cluster, remote))
    (cid,) = await cluster.submit([call("job", name="one", seconds=0), finish()], tools=["remote/*"])
    await cluster.settle([cid])
    (meta,) = remote.metas
    assert meta[KEY].startswith(cid)
    assert meta["traceparent"].startswith("00-")
    assert meta["io.modelcontextprotocol/protocolVersion"] == "2026-07-28"
    assert "io.modelcontextprotocol/tasks" in meta["io.modelcontextprotocol/clientCapabilities"]["extensions"]
    assert remote.seen["initialize"] == remote.seen["ping"] == 0


async def test_waiting_calls_take_no_slot(cluster: FaultCluster, remote: TaskServer) -> None:
    cluster.start(**settings(cluster, remote), DECKHANDS_CONCURRENCY="1")
    waiting = await cluster.submit([call("job", name="long"), finish()], count=4, tools=["remote/*"])
    await until(lambda: remote.started["long"] == 4, what="four tasks at once")
    (quick,) = await cluster.submit([bash("echo hello"), finish()])
    await cluster.settle([quick])
    remote.end_all()
    await cluster.settle(waiting)
    for cid in waiting:
        assert [text_of(answer) for answer in await cluster.answers(cid, "action.call_tool_mcp")] == ["long is done"]


async def test_stopped_call_ends_its_task(cluster: FaultCluster, remote: TaskServer) -> None:
    cluster.start(**settings(cluster, remote))
    (cid,) = await cluster.submit([call("job", name="long"), finish()], tools=["remote/*"])
    await until(lambda: remote.started["long"] == 1, what="the task")
    await cluster.client.cancel(cid)
    await cluster.settle([cid])
    await until(lambda: all(job.is_cancelled for job in remote.jobs.values()), what="its end at the server")
    await until(lambda: _is_empty(cluster, cid), what="the end of the record")


async def _is_empty(cluster: FaultCluster, conversation_id: str) -> bool:
    return not await records(cluster, conversation_id)


async def test_waiting_conversation_outlives_any_number_of_dead_controllers(
    cluster: FaultCluster, remote: TaskServer
) -> None:
    """It reaches its wait between the deaths, so that nothing it has done there can be their cause."""
    patience = {"DECKHANDS_IDLE_SECONDS": "3600"}  # else it is released, which acquits it too
    cluster.start(**settings(cluster, remote), **patience)
    (cid,) = await cluster.submit([call("job", name="long"), finish()], tools=["remote/*"])
    await until(lambda: any(job.polls for job in remote.jobs.values()), what="a poll")
    for number in range(1, 4):
        cluster.kill(f"c{number}")
        cluster.start_controller("victim", DECKHANDS_FAILPOINTS="controller.after_claim:kill@1")
        assert await cluster.until_ended("victim", limit=60) == -9
        cluster.start_controller(f"c{number + 1}", **patience)
        await until(lambda: _is_acquitted(cluster, cid), limit=60, what="an acquittal")
    remote.end_all()
    await cluster.settle([cid])
    assert [text_of(answer) for answer in await cluster.answers(cid, "action.call_tool_mcp")] == ["long is done"]


async def test_waiting_conversation_whose_release_kills_is_given_up(cluster: FaultCluster, remote: TaskServer) -> None:
    cluster.start(**settings(cluster, remote), DECKHANDS_IDLE_SECONDS="3600")
    (cid,) = await cluster.submit([call("job", name="long"), finish()], tools=["remote/*"])
    await until(lambda: any(job.polls for job in remote.jobs.values()), what="a poll")
    cluster.kill("c1")
    for _ in range(3):
        cluster.start_controller(
            "victim", DECKHANDS_IDLE_SECONDS="0.2", DECKHANDS_FAILPOINTS="controller.before_release:kill@1"
        )
        assert await cluster.until_ended("victim", limit=60) == -9
    cluster.start_controller("c2")
    await cluster.settle([cid])
    assert (await cluster.client.row(cid)).state == AgentState.ERROR


async def _is_acquitted(cluster: FaultCluster, conversation_id: str) -> bool:
    grants = cluster.client.store.known_keys(conversation_id).grants
    return list(await cluster.client.store.call("HMGET", grants, "crashes", "mark")) == [None, None]


async def test_waiting_call_outlives_any_number_of_dead_tool_workers(cluster: FaultCluster, remote: TaskServer) -> None:
    environment = settings(cluster, remote)
    cluster.start(**environment)
    (cid,) = await cluster.submit([call("job", name="long"), finish()], tools=["remote/*"])
    await until(lambda: any(job.polls for job in remote.jobs.values()), what="a poll")
    for number in range(1, 4):
        cluster.kill(f"t{number}")
        cluster.start_tool("victim", **environment, DECKHANDS_FAILPOINTS="tool.before_run:kill@1")
        assert await cluster.until_ended("victim", limit=60) == -9
        remote.seen["tasks/get"] = 0
        cluster.start_tool(f"t{number + 1}", **environment)
        await until(lambda: remote.seen["tasks/get"] > 0, limit=60, what="a poll")
    remote.end_all()
    await cluster.settle([cid])
    assert [text_of(answer) for answer in await cluster.answers(cid, "action.call_tool_mcp")] == ["long is done"]


async def test_result_that_kills_its_workers_is_given_up(cluster: FaultCluster, remote: TaskServer) -> None:
    environment = settings(cluster, remote)
    cluster.start(**environment)
    (cid,) = await cluster.submit([call("job", name="long"), finish()], tools=["remote/*"])
    await until(lambda: any(job.polls for job in remote.jobs.values()), what="a poll")
    cluster.kill("t1")
    remote.end_all()
    for _ in range(2):
        cluster.start_tool("victim", **environment, DECKHANDS_FAILPOINTS="tool.after_result:kill@1")
        assert await cluster.until_ended("victim", limit=60) == -9
    cluster.start_tool("victim", **environment, DECKHANDS_FAILPOINTS="tool.after_result:kill@1")
    await cluster.settle([cid])
    (answer,) = await cluster.answers(cid, "action.call_tool_mcp")
    assert isinstance(answer, OutcomeUnknownObservation)


async def test_absence_of_the_server_is_waited_out(cluster: FaultCluster, remote: TaskServer) -> None:
    cluster.start(**settings(cluster, remote))
    (cid,) = await cluster.submit([call("job", name="long"), finish()], tools=["remote/*"])
    await until(lambda: any(job.polls for job in remote.jobs.values()), what="a poll")
    remote.is_away = True
    cluster.kill("t1")
    cluster.start_tool("t2", **settings(cluster, remote))
    await until(lambda: "cannot be polled" in cluster.log_of("t2") or "cannot be reached" in cluster.log_of("t2"))
    remote.is_away = False
    remote.end_all()
    await cluster.settle([cid], limit=120)
    (answer,) = await cluster.answers(cid, "action.call_tool_mcp")
    assert text_of(answer) == "long is done"
    assert remote.started == {"long": 1}


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"error": {"code": -32000, "message": "out of paper"}}, "out of paper"),
        ({"result": {"content": 7}}, "not a result"),
        ({"is_cancelled": True}, "cancelled the task"),
    ],
)
async def test_failed_task_is_a_clear_answer(
    cluster: FaultCluster, remote: TaskServer, end: dict[str, Any], words: str
) -> None:
    cluster.start(**settings(cluster, remote))
    (cid,) = await cluster.submit([call("job", name="bad"), finish()], tools=["remote/*"])
    await until(lambda: remote.jobs, what="the task")
    for name, value in end.items():
        setattr(remote.jobs["task-0"], name, value)
    remote.end_all()
    await cluster.settle([cid])
    (answer,) = await cluster.answers(cid, "action.call_tool_mcp")
    assert words in answer.content


async def test_late_task_is_cancelled_and_reported(cluster: FaultCluster, remote: TaskServer) -> None:
    cluster.start(**settings(cluster, remote, task_timeout=1))
    (cid,) = await cluster.submit([call("job", name="long"), finish()], tools=["remote/*"])
    await cluster.settle([cid])
    (answer,) = await cluster.answers(cid, "action.call_tool_mcp")
    assert "not ended within 1 seconds" in answer.content
    assert remote.jobs["task-0"].is_cancelled


@pytest.mark.parametrize(
    ("conversations", "calls", "longest_seconds"), [(4, 10, 6.0), pytest.param(20, 10, 60.0, marks=pytest.mark.slow)]
)
async def test_each_task_call_ends_once_under_kills(
    cluster: FaultCluster, remote: TaskServer, conversations: int, calls: int, longest_seconds: float
) -> None:
    await _call_under_kills(cluster, remote, conversations, calls, longest_seconds)


@pytest.mark.soak
async def test_each_of_a_thousand_task_calls_ends_once_under_kills(cluster: FaultCluster, remote: TaskServer) -> None:
    await _call_under_kills(cluster, remote, 100, 10, 600.0)


async def _call_under_kills(
    cluster: FaultCluster, remote: TaskServer, conversations: int, calls: int, longest_seconds: float
) -> None:
    """Let conversations make calls of 1 s to `longest_seconds`, most of them short, while both workers are killed."""
    chance = random.Random(7)
    remote.poll_ms = round(16 * longest_seconds)  # 1,000 long tasks are not polled ten times a second
    environment = settings(cluster, remote)
    cluster.start(**environment)
    worker = 1
    ids: list[str] = []
    for number in range(conversations):
        names = [f"{number}-{n}" for n in range(calls)]
        asked = [
            call("keyed_job", name=name, seconds=math.exp(chance.uniform(0, math.log(longest_seconds))))
            for name in names
        ]
        turn = {"tool_calls": [found for one in asked for found in one["tool_calls"]]}
        ids += await cluster.submit([turn, finish()], tools=["remote/*"], tool_concurrency=16)

    everything = {f"{number}-{n}" for number in range(conversations) for n in range(calls)}

    async def kill_again_and_again() -> None:
        nonlocal worker
        not_started: set[str] = set()
        while True:
            # A third death in a row would give up a call that was neither started nor polled meanwhile, or a
            # conversation, and rightly so.
            await until(lambda missing=not_started: missing <= remote.started.keys(), limit=300, what="their start")
            not_started = everything - remote.started.keys()
            polls = {job.name: job.polls for job in remote.jobs.values()}
            await until(lambda polls=polls: _are_polled_again(remote, polls), limit=300, what="a poll of each task")
            await until(lambda: _may_lose_a_worker(cluster, ids), limit=120, what="conversations without two deaths")
            cluster.kill(f"t{worker}")
            cluster.kill(f"c{worker}")
            worker += 1
            cluster.start_tool(f"t{worker}", **environment)
            cluster.start_controller(f"c{worker}")

    killing = asyncio.create_task(kill_again_and_again())
    try:
        async with asyncio.timeout(unhurried(120 + 3 * longest_seconds)):
            await until(lambda: len(remote.started) >= conversations * calls // 2, limit=120 + longest_seconds)
            await asyncio.wait({killing}, timeout=0.8 * longest_seconds)
            await until(lambda: worker > 2 or killing.done(), limit=600, what="two kills of both workers")
    finally:
        killing.cancel()
        with suppress(asyncio.CancelledError):
            await killing
    assert worker > 2, "at least two kills of both workers"
    await cluster.settle(ids, limit=120 + 3 * longest_seconds)
    answered: Counter[str] = Counter()
    for cid in ids:
        events = await cluster.client.events(cid)
        actions = {event.id: event.arguments["name"] for event in events if isinstance(event, MCPAction)}
        for answer in events:
            if isinstance(answer, Observation) and answer.cause in actions:
                assert text_of(answer) == f"{actions[answer.cause]} is done"
                answered[actions[answer.cause]] += 1
    found = {
        "calls": len(everything),
        "kills of both workers": worker - 1,
        "never started": len(everything - remote.started.keys()),
        "started twice": sum(count > 1 for count in remote.started.values()),
        "never answered": len(everything - answered.keys()),
        "answered twice": sum(count > 1 for count in answered.values()),
    }
    print(found)
    assert not any([*found.values()][2:]), found


async def _may_lose_a_worker(cluster: FaultCluster, ids: Sequence[str]) -> bool:
    store = cluster.client.store
    counts = await store.call_many([("HGET", store.known_keys(cid).grants, "crashes") for cid in ids])
    return all(int(count or 0) < 2 for count in counts)


def _are_polled_again(remote: TaskServer, polls: Mapping[str, int]) -> bool:
    """Return whether calls wait again: each task was polled since then, or had its end seen; one at least."""
    is_polled = [job.is_end_seen or job.polls > polls.get(job.name, 0) for job in remote.jobs.values()]
    return bool(is_polled) and all(is_polled)
