"""Traces of a real cluster, as a collector receives them: one trace of each conversation, over all processes."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from broker.contract.actions import AgentDelegateAction
from broker.contract.events import AgentSpec, ConversationCreated, LLMSpec, ModelCallFailed
from broker.contract.observations import ErrorObservation
from broker.runtime.ids import make_delegate_id
from broker.runtime.tracing import make_traceparent
from tests.faults.harness import FaultCluster, steps
from tests.faults.server_process import free_port, server
from tests.otlp_receiver import Receiver, receiving
from tests.polling import until
from tests.server_parts import add_key
from tests.turns import bash, call, finish

pytestmark = pytest.mark.asyncio(loop_scope="module")

HIDDEN = "tip-top-nine-lives"
OUTER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> AsyncIterator[FaultCluster]:
    async with FaultCluster(tmp_path_factory.mktemp("traces")).running() as found:
        found.start_controller(**receiver.environment)
        found.start_tool(**receiver.environment)
        yield found


async def submitted(cluster: FaultCluster, receiver: Receiver, command: str) -> str:
    """Submit a task by the command line, in its own process."""
    model = cluster.script(bash(command), finish())
    folder = cluster.root / "work" / "traced"
    folder.mkdir(parents=True, exist_ok=True)
    done = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deckhands", "submit", "-t", "a private task", "--model", model),
        *("--workspace", str(folder), "--json"),
        env={**os.environ, **receiver.environment, "DECKHANDS_URL": cluster.store.url},
        stdout=asyncio.subprocess.PIPE,
    )
    written, _ = await done.communicate()
    assert done.returncode == 0
    return str(json.loads(written)["conversation_id"])


async def test_one_trace_spans_command_to_tool_through_a_kill(cluster: FaultCluster, receiver: Receiver) -> None:
    gate = cluster.root / "gate"
    cid = await submitted(cluster, receiver, f"until [ -e {gate} ]; do sleep 0.05; done; echo private-result")

    async def is_acting() -> bool:
        return bool(receiver.of(cid, "invoke_agent") and receiver.of(cid, "chat"))

    await until(is_acting, limit=60.0, what="the spans of the first controller")
    await cluster.until_kind(cid, "action.run")
    cluster.kill("c1")
    cluster.start_controller("c2", **receiver.environment)
    gate.touch()
    await cluster.settle([cid])

    async def are_there() -> bool:
        return len(receiver.of(cid, "chat")) == 2 and bool(receiver.of(cid, "action"))

    await until(are_there, limit=60.0, what="the spans of all")
    submit, *_ = receiver.of(cid, "submit")
    first, second = receiver.of(cid, "invoke_agent")
    before, after = receiver.of(cid, "chat")
    (action,) = [
        span
        for span in receiver.of(cid, "action")
        if span.span_id == receiver.of(cid, "execute_tool execute_bash")[0].parent_id
    ]
    (tool,) = receiver.of(cid, "execute_tool execute_bash")
    chain = (submit, first, before, action, tool)
    assert {span.trace_id for span in receiver.spans if span.attributes.get("gen_ai.conversation.id") == cid} == {
        submit.trace_id
    }
    assert [span.parent_id for span in chain[1:]] == [span.span_id for span in chain[:-1]]
    assert (second.parent_id, after.parent_id) == (submit.span_id, second.span_id)
    assert [span.role for span in chain] == ["client", "controller", "controller", "tool", "tool"]
    assert len({span.pid for span in (submit, first, second, tool)}) == 4
    assert first.name == "invoke_agent CodeActAgent"
    assert first.attributes["gen_ai.operation.name"] == "invoke_agent"
    assert {first.attributes["gen_ai.provider.name"], before.attributes["gen_ai.provider.name"]} == {"scripted"}
    assert before.attributes["gen_ai.operation.name"] == "chat"
    assert before.attributes["gen_ai.request.model"].startswith("scripted/")
    assert {"gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"} <= before.attributes.keys()
    assert tool.attributes["gen_ai.operation.name"] == "execute_tool"
    assert tool.attributes["gen_ai.tool.name"] == "execute_bash"
    assert not any(b"private" in body for body in receiver.bodies)


async def test_content_is_recorded_on_request_with_masked_secrets(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = {"DECKHANDS_SECRET_KEY": base64.b64encode(bytes(32)).decode()}
    asked = {**receiver.environment, "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true", **key}
    monkeypatch.setenv("DECKHANDS_SECRET_KEY", key["DECKHANDS_SECRET_KEY"])
    turn = {"text": f"it may be {HIDDEN}", **bash('echo "told $TOKEN"')}
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_controller(**asked)
        cluster.start_tool(**asked)
        (cid,) = await cluster.submit([turn, finish()], task={"secrets": {"TOKEN": HIDDEN}})
        await cluster.settle([cid])
        await until(lambda: receiver.of(cid, "execute_tool") and len(receiver.of(cid, "chat")) == 2, what="spans")
    (tool,) = receiver.of(cid, "execute_tool")
    first, second = ({**span.attributes} for span in receiver.of(cid, "chat"))
    assert "told $TOKEN" in json.loads(tool.attributes["gen_ai.tool.call.arguments"])["command"]
    assert "told <secret_hidden>" in json.loads(tool.attributes["gen_ai.tool.call.result"])
    (reply,) = json.loads(first["gen_ai.output.messages"])
    assert reply["parts"][0] == {"type": "text", "content": "it may be <secret_hidden>"}
    assert (reply["parts"][1]["type"], reply["parts"][1]["name"]) == ("tool_call", "execute_bash")
    assert reply["finish_reason"]
    assert json.loads(first["gen_ai.system_instructions"])[0]["type"] == "text"
    asked_again = json.loads(second["gen_ai.input.messages"])
    assert [message["role"] for message in asked_again][-2:] == ["assistant", "tool"]
    assert "told <secret_hidden>" in asked_again[-1]["parts"][0]["response"]
    assert not any(HIDDEN.encode() in body for body in receiver.bodies)


async def test_content_that_cannot_be_rendered_fails_no_call(tmp_path: Path, receiver: Receiver) -> None:
    asked = {**receiver.environment, "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"}
    deep = json.dumps({"command": 0}).replace("0", "[" * 700 + "]" * 700)
    turn = {"tool_calls": [{"id": "one", "name": "execute_bash", "arguments": deep}]}
    async with FaultCluster(tmp_path).running() as cluster:
        cluster.start_controller(**asked)
        cluster.start_tool(**asked)
        (cid,) = await cluster.submit([turn, finish()])
        await cluster.settle([cid])
        events = await cluster.client.events(cid)
    assert [event for event in events if isinstance(event, ErrorObservation)]
    assert not [event for event in events if isinstance(event, ModelCallFailed)]


async def test_a_delegate_is_in_the_trace_of_its_parent(cluster: FaultCluster, receiver: Receiver) -> None:
    turns = [call("delegate", agent="one", task="do a private part"), finish()]
    parts = {"one": AgentSpec(llm=LLMSpec(model=cluster.script(finish())))}
    (cid,) = await cluster.submit(turns, enable_delegation=True, delegates=parts)
    await cluster.settle([cid])
    (action,) = [event for event in await cluster.client.events(cid) if isinstance(event, AgentDelegateAction)]
    part = make_delegate_id(cid, action.id)
    await until(lambda: receiver.of(part, "chat") and len(receiver.of(cid, "chat")) == 2, limit=60.0, what="spans")
    claim, chat = receiver.of(part, "invoke_agent")[0], receiver.of(part, "chat")[0]
    asked = receiver.of(cid, "chat")[0]
    assert (claim.parent_id, chat.parent_id) == (asked.span_id, claim.span_id)
    found = {span.trace_id for name in (cid, part) for span in receiver.of(name, "")}
    assert found == {make_traceparent(cid).split("-")[1]}


async def test_request_continues_a_valid_trace_but_no_forged_one(cluster: FaultCluster, receiver: Receiver) -> None:
    task = {"task": "do it", "delay": 3_600.0}
    begun = []
    home, port = cluster.root / "server", free_port()
    headers = {"Authorization": f"Bearer {await add_key(cluster.client.store)}"}
    async with (
        server(cluster.store.url, home, port, environment=receiver.environment),
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client,
    ):
        for text in (OUTER, f"{OUTER}-x"):
            answer = await client.post("/conversations", json=task, headers={"traceparent": text})
            assert answer.status_code == 201, answer.text
            begun.append(answer.json()["conversation_id"])
        await until(lambda: all(receiver.of(cid, "submit") for cid in begun), limit=60.0, what="spans of the server")
    continued, other = (receiver.of(cid, "submit")[0] for cid in begun)
    assert [continued.trace_id, continued.parent_id] == OUTER.split("-")[1:3]
    assert other.trace_id != continued.trace_id
    assert (continued.role, other.role) == ("server", "server")
    assert other.parent_id == ""
    created = (await cluster.client.events(begun[0]))[0]
    assert isinstance(created, ConversationCreated)
    assert created.traceparent == f"00-{continued.trace_id}-{continued.span_id}-01"
    for cid in begun:
        await cluster.client.cancel(cid)


async def test_a_collector_that_is_away_or_silent_holds_up_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        away = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}", "OTEL_BSP_SCHEDULE_DELAY": "50"}
        mute = {**away, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        async with FaultCluster(tmp_path).running() as cluster:
            cluster.start_controller(**mute)
            cluster.start_tool(**away)
            (cid,) = await cluster.submit(steps(5))
            await cluster.check([cid], commands=5)
            for name in ("c1", "t1"):
                cluster.signal(name, signal.SIGTERM)
                assert await cluster.until_ended(name, limit=30.0) == 0
                reports = [line for line in cluster.log_of(name).splitlines() if "Failed to export" in line]
                assert len(reports) <= 1, reports


async def test_forged_contexts_are_none_and_others_are_continued(cluster: FaultCluster, receiver: Receiver) -> None:
    forged = ("", "00", OUTER.upper(), f"{OUTER}-x", OUTER.replace("b7ad6b7169203331", "0" * 16), "\n" * 55)
    for text, expected in ((OUTER, OUTER), *((text, None) for text in forged)):
        cid = await cluster.client.submit("do it", traceparent=text, delay=3_600.0)
        created = (await cluster.client.events(cid))[0]
        assert isinstance(created, ConversationCreated)
        assert created.traceparent == expected  # no process traces here, so the context is passed on unchanged
        await cluster.client.cancel(cid)
    assert make_traceparent(cid) == make_traceparent(cid)


async def test_a_fork_is_in_the_trace_of_its_origin(cluster: FaultCluster) -> None:
    origin = await cluster.client.submit("do it", traceparent=OUTER, delay=3_600.0)
    fork = await cluster.client.fork(origin)
    created = (await cluster.client.events(fork))[0]
    assert isinstance(created, ConversationCreated)
    assert created.traceparent == OUTER
    for cid in (origin, fork):
        await cluster.client.cancel(cid)
