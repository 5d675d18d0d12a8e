"""Workers are stopped while store and queue are gone: they end by themselves, and what they had continues later.

One server is both here. Killed, it refuses; stopped, it says nothing, as one does whose machine is gone.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from broker.celery.bootstep import STOP_LIMIT_SECONDS
from broker.coordination.membership import list_members
from tests.faults.harness import FaultCluster, steps
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
    await cluster.settle(ids)
    await cluster.check(ids, commands=2)


async def test_worker_that_never_found_a_store_ends_on_request(cluster: FaultCluster) -> None:
    cluster.store.child.send(signal.SIGKILL)
    await cluster.store.child.wait()
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


async def test_tool_worker_ends_resting_workspaces_with_its_cluster(
    cluster: FaultCluster,
) -> None:
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
