"""Stop requests take effect: calls and commands of a stopped conversation, and workers without store and queue.

One server is both here. Killed, it refuses; stopped, it is silent, like one on a lost machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from broker.celery.bootstep import STOP_LIMIT_SECONDS
from broker.contract.events import Observation
from broker.contract.observations import ErrorObservation
from broker.coordination.membership import list_members
from broker.tools.custom_tools import ToolContext
from controller_worker.loop.conversation_loop import STOP_SECONDS as CALL_STOP_SECONDS
from deckhands.client.reasons.history import Stopped, fold_history
from tests.faults.harness import FaultCluster, steps
from tests.integration.test_mcp import offering, program
from tests.polling import unhurried, until
from tests.turns import bash, call, finish
from tool_worker.worker.steps.running_calls import ABANDONED, RunningCalls
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.workspaces import Workspaces

COMPOSE = Path(__file__).resolve().parents[2] / "compose.yaml"
BLOCKED = """
import os, signal, threading
from broker.celery.bootstep import LoopThread
begun = threading.Event()
class Service:
    async def run(self, stop):
        begun.set()
        await stop.wait()
        print("stopping", flush=True)
thread = LoopThread(Service())
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
thread.handle_signals()
thread.start()
begun.wait()
os.system("echo blocked; cat")
"""
"""A worker whose main thread waits where no handler of Python's runs, as in the resolver."""
NAMES = ("c1", "c2", "c3", "t1")


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="refuses", marks=pytest.mark.soak), pytest.param(signal.SIGSTOP, id="is silent")],
)
async def test_workers_end_on_request_without_store_and_queue(
    durable_cluster: FaultCluster, number: signal.Signals
) -> None:
    cluster = durable_cluster
    for name in NAMES[:3]:
        cluster.start_controller(name)
    cluster.start_tool("t1")

    async def all_are_at_work() -> bool:
        return len(await list_members(cluster.client.store)) == len(NAMES)

    await cluster.until(all_are_at_work)
    ids = await cluster.submit(steps(2, seconds=1.0), count=3)
    await cluster.until(lambda: all("begin-0" in cluster.effects(cid) for cid in ids))
    cluster.store.child.send(number)
    if number == signal.SIGKILL:
        await cluster.store.child.wait()
        await cluster.until(lambda: all("Cannot connect" in cluster.log_of(name) for name in NAMES))
    for name in NAMES:
        cluster.signal(name, signal.SIGTERM)
    # The margin is for a busy machine: the limit itself is the worker's own.
    limit = STOP_LIMIT_SECONDS + 4
    assert await asyncio.gather(*(cluster.until_ended(name, limit=limit) for name in NAMES)) == [0, 0, 0, 0]
    if number == signal.SIGKILL:
        await cluster.store.start()
    else:
        cluster.store.child.send(signal.SIGCONT)
    cluster.start_controller("c4")
    cluster.start_tool("t2")
    await cluster.check(ids, commands=2)


async def test_worker_that_never_found_a_store_ends_on_request(cluster: FaultCluster) -> None:
    await cluster.kill_store()
    cluster.start_controller("c1", DECKHANDS_ANY_MODEL="")  # its store need not be there
    cluster.start_tool("t1")
    for name in ("c1", "t1"):
        await cluster.until(lambda name=name: "Cannot connect" in cluster.log_of(name))
        cluster.signal(name, signal.SIGTERM)
    for name in ("c1", "t1"):
        assert await cluster.until_ended(name, limit=STOP_LIMIT_SECONDS) == 0
    await cluster.store.start()


def test_worker_blocked_in_the_kernel_starts_to_stop_at_once() -> None:
    command = [sys.executable, "-c", BLOCKED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=COMPOSE.parent) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"blocked\n"
        worker.send_signal(signal.SIGTERM)
        assert worker.stdout.readline() == b"stopping\n"
        assert worker.communicate()[0] == b"handled\n"


def test_containers_are_given_longer_than_a_worker_takes() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    grace = {services[name]["stop_grace_period"] for name in ("controller", "tools")}
    assert grace == {"20s"}
    assert STOP_LIMIT_SECONDS < 20


async def test_tool_worker_ends_resting_workspaces_with_its_cluster(cluster: FaultCluster) -> None:
    cluster.start_controller()
    cluster.start_tool(DECKHANDS_WORKSPACE_ENDS_WITH_WORKER="1")
    (resting,) = await cluster.submit(steps(1))
    serves = {"name": "execute_bash", "arguments": {"command": "sleep 600 & echo begin-0 >> effects"}}
    (serving,) = await cluster.submit([{"tool_calls": [serves]}, *steps(0)])
    await cluster.settle([resting, serving])
    (working,) = await cluster.submit(steps(1, seconds=60))
    await cluster.until(lambda: cluster.effects(working) == ["begin-0"], what="command under way")
    cluster.signal("t1", signal.SIGTERM)
    await cluster.until_ended("t1")
    living = {found.conversation_id for found in Workspaces(cluster.root / "n").list() if found.is_alive}
    assert living == {serving, working}


STOP_SECONDS = 1.0
TOOLS = {"DECKHANDS_TOOLS": "tests.example_tools:linger,tests.example_tools:grind"}


def sleeping() -> set[str]:
    """Return the arguments of the machine's live `sleep` programs."""
    commands = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    return {command[1] for command in commands if command[:1] == ["sleep"]}


@pytest.mark.parametrize("tool", ["linger", "grind"])
async def test_a_tool_whose_conversation_is_stopped_ends(cluster: FaultCluster, tool: str) -> None:
    trace = cluster.root / "trace"
    cluster.start_controller()
    # The thread runs on another node than the workspace's, where no order about the workspace comes to.
    cluster.start_tool("far", DECKHANDS_POOLS="gpu", DECKHANDS_NODE="far", **TOOLS)
    cluster.start_tool("near", **TOOLS)
    (conversation_id,) = await cluster.submit([call(tool, trace=str(trace)), finish()], tools=[tool])
    await cluster.until(lambda: lines(trace) == ["begun"], what="the call")
    await cluster.client.cancel(conversation_id)
    await cluster.settle([conversation_id])
    (answer,) = await cluster.answers(conversation_id, "action.call_tool")
    assert isinstance(answer, ErrorObservation)
    await cluster.until(lambda: lines(trace) == ["begun", "stopped"], what="end of the tool")
    # The tool's own answer comes too late.
    assert len(await cluster.answers(conversation_id, "action.call_tool")) == 1


async def test_nothing_runs_any_more_for_a_conversation_that_is_stopped(cluster: FaultCluster) -> None:
    cluster.start()
    marks = [f"{number}.{os.getpid()}" for number in range(61, 65)]
    earlier = f"sleep {marks[0]} & echo"
    tree = f"setsid sleep {marks[1]} & trap '' INT TERM; (trap '' INT; sleep {marks[2]} & sleep {marks[3]}); echo never"
    (conversation_id,) = await cluster.submit([bash(earlier), bash(tree)])
    await cluster.until(lambda: sleeping() >= set(marks), what="the programs")
    began = asyncio.get_running_loop().time()
    await cluster.client.cancel(conversation_id)
    await cluster.until(lambda: not sleeping() & set(marks), what="their end")
    took = asyncio.get_running_loop().time() - began
    await cluster.settle([conversation_id])
    kinds = [event.kind for event in await cluster.client.events(conversation_id)]
    decided = kinds.index("action.change_agent_state")
    assert kinds[decided + 1 : decided + 3] == ["observation.error", "observation.agent_state_changed"]
    assert took < unhurried(STOP_SECONDS)
    host = HostFolder(cluster.root / "n", conversation_id)
    await cluster.until(lambda: not host.is_alive, what="the end of the host")


async def find_stops(cluster: FaultCluster, conversation_id: str, parties: set[str]) -> dict[str, Stopped]:
    """Wait until these parties have stopped by the log, verify it, and return when."""

    async def have_all() -> bool:
        return parties <= {
            stop.party for stop in fold_history(await cluster.client.events(conversation_id)).stops.parties
        }

    await cluster.until(have_all, what=f"the stops of {parties}")
    events = await cluster.client.events(conversation_id)
    assert (await cluster.client.verify(conversation_id)).violations == ()
    stops = fold_history(events).stops.parties
    assert len(stops) == len({stop.party for stop in stops})
    shown = (await cluster.client.why(conversation_id)).links[-1].lines
    assert [line.partition("]")[0] for line in shown] == [f"[{stop.event_id}" for stop in stops]
    return {stop.party: stop for stop in stops}


async def test_log_says_when_a_stopped_command_has_ended(cluster: FaultCluster) -> None:
    cluster.start()
    mark = f"71.{os.getpid()}"
    (conversation_id,) = await cluster.submit([bash(f"trap '' INT TERM; sleep {mark}; echo never")])
    await cluster.until(lambda: mark in sleeping(), what="the program")
    (action,) = [event.id for event in await cluster.client.events(conversation_id) if event.kind == "action.run"]
    await cluster.client.cancel(conversation_id)
    stops = await find_stops(cluster, conversation_id, {"controller", f"action {action}"})
    assert mark not in sleeping()
    ended = stops[f"action {action}"]
    environment = {**os.environ, "DECKHANDS_URL": cluster.url, "DECKHANDS_HOME": str(cluster.root / "home")}
    show = [sys.executable, "-P", "-m", "deckhands", "show", conversation_id]
    shown = await asyncio.to_thread(subprocess.run, show, env=environment, capture_output=True, text=True, check=True)
    assert str(ended) in shown.stdout
    assert ended.after_seconds is not None
    assert 0 <= (ended.took_seconds or 0) <= ended.after_seconds + 1


async def test_log_says_when_a_stopped_model_call_has_ended(cluster: FaultCluster, tmp_path: Path) -> None:
    calls: list[str] = []

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        calls.append("asked")
        while await reader.read(100_000):
            pass
        calls.append("ended")
        writer.close()

    async with await asyncio.start_server(keep_silent, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        table = tmp_path / "models.toml"
        table.write_text(
            f'[llm]\nmodel = "openai/x"\nbase_url = "http://{host}:{port}/v1"\napi_key = "k"\n', encoding="utf-8"
        )
        cluster.start_controller(LLM_CONFIG=str(table), DECKHANDS_ANY_MODEL="")
        cluster.start_tool()
        conversation_id = await cluster.client.submit("do it")
        await cluster.until(lambda: calls == ["asked"], limit=60, what="a call of the model")
        await cluster.client.cancel(conversation_id)
        stops = await find_stops(cluster, conversation_id, {"controller", "the model call"})
        assert 0 <= (stops["the model call"].took_seconds or 0) <= CALL_STOP_SECONDS
        await cluster.until(lambda: calls == ["asked", "ended"], what="the end of the call")


async def test_log_says_when_an_interrupted_tool_has_ended(cluster: FaultCluster) -> None:
    trace = cluster.root / "trace"
    cluster.start_controller()
    cluster.start_tool("t1", **TOOLS)
    (conversation_id,) = await cluster.submit([call("linger", trace=str(trace)), finish()], tools=["linger"])
    await cluster.until(lambda: lines(trace) == ["begun"], what="the call")
    (action,) = [event.id for event in await cluster.client.events(conversation_id) if event.kind == "action.call_tool"]
    await cluster.client.interrupt(conversation_id)
    await find_stops(cluster, conversation_id, {"controller", f"action {action}"})
    assert lines(trace) == ["begun", "stopped"]


async def test_a_call_of_an_mcp_server_is_stopped_there_too(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    answered = asyncio.Event()

    async def is_answered(conversation_id: str, action_id: int) -> bool:
        assert (conversation_id, action_id) == ("conversation-1", 3)
        return answered.is_set()

    calls = RunningCalls(is_answered)
    async with offering(program(), tmp_path) as example:
        call = asyncio.create_task(
            calls.run(ToolContext("conversation-1", 3), example.call("linger", trace=str(trace)))
        )
        await until(lambda: lines(trace) == ["begun"])
        answered.set()
        stopped = await call
        assert isinstance(stopped, ErrorObservation)
        assert stopped.error_id == "cancelled"
        await until(lambda: lines(trace) == ["begun", "stopped"])
        # And the server serves on.
        assert (await example.result("echo", text="well"))["content"][0]["text"] == "well"


async def test_order_stops_a_call_but_an_unlistening_one_continues() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def stubborn() -> Observation:
        begun.set()
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue
        return ErrorObservation(content="too late")

    async def never(conversation_id: str, action_id: int) -> bool:
        return False

    calls = RunningCalls(never, stop_seconds=0.05)
    assert not calls.stop("conversation-1", 1)
    running = asyncio.create_task(calls.run(ToolContext("conversation-1", 1), stubborn()))
    await begun.wait()
    assert calls.stop("conversation-1", 1)
    assert getattr(await running, "error_id", "") == ABANDONED  # so its end is not reported
    assert not calls.stop("conversation-1", 1)
    may_end.set()


def lines(trace: Path) -> list[str]:
    return trace.read_text().splitlines() if trace.exists() else []
