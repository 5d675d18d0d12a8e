"""An embedded cluster is kept up: what dies is replaced, what cannot be started is named, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from broker.runtime.errors import DeckhandsError, UsageError
from broker.store.connection import MultiplexedConnection
from deckhands.cluster.embedded_cluster import Cluster, ClusterSpec, WorkerKeepsFailing, node_name
from tests.polling import until

SLEEPING = ("sleep", "600")
CLUSTER = """
import asyncio, sys
from pathlib import Path
from deckhands.cluster.embedded_cluster import Cluster, ClusterSpec
async def main():
    commands = {"controller": ("sleep", "600"), "tools": ("sleep", "600")}
    cluster = Cluster(ClusterSpec(Path(sys.argv[1]), commands=commands))
    await cluster.start()
    children = [cluster.store.child, *(worker.child for worker in cluster.workers.values())]
    print(*(child.pid for child in children), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
async def start(tmp_path):
    """Yields a function that starts a cluster of given commands; it is stopped at the end."""
    clusters: list[Cluster] = []

    async def begin(*, controller=SLEEPING, tools=SLEEPING, **fields) -> tuple[Cluster, list[str]]:
        notices: list[str] = []
        spec = ClusterSpec(tmp_path, commands={"controller": controller, "tools": tools}, **fields)
        clusters.append(Cluster(spec, on_notice=notices.append))
        await clusters[-1].start()
        return clusters[-1], notices

    yield begin
    for cluster in clusters:
        await cluster.stop()


def is_alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def test_a_worker_that_dies_is_replaced(start):
    cluster, notices = await start(controllers=2)
    worker = cluster.workers["controller-2"]
    before = worker.child.pid
    worker.child.send(signal.SIGKILL)
    await until(lambda: worker.replaced == 1, what="replacement")
    assert is_alive(worker.child.pid)
    assert worker.child.pid != before
    assert notices == ["controller-2 ended with SIGKILL; starting it again"]


async def test_workers_of_a_store_that_was_emptied_stay_down(tmp_path: Path) -> None:
    notices: list[str] = []
    environment = {"PATH": os.environ["PATH"]}
    cluster = Cluster(ClusterSpec(tmp_path, environment=environment, gives_up=False), on_notice=notices.append)
    await cluster.start()
    try:
        await cluster.until_ready()
        connection = MultiplexedConnection(cluster.url)
        await connection.call("FLUSHALL")
        for worker in cluster.workers.values():
            await worker.child.wait()
        await until(lambda: len(notices) == len(cluster.workers), what="notices")
        assert all("stays down: the store was emptied or replaced" in notice for notice in notices)
        assert {worker.replaced for worker in cluster.workers.values()} == {0}
        assert await connection.call("KEYS", "deck:{*") == []
        await connection.aclose()
    finally:
        await cluster.stop()


async def test_a_store_that_dies_is_replaced_and_has_kept_everything(start):
    cluster, notices = await start()
    connection = MultiplexedConnection(cluster.url)
    await connection.call("SET", "a", "1")
    before = cluster.store.child.pid
    cluster.store.child.send(signal.SIGKILL)
    await until(lambda: cluster.store.child.pid != before, what="replacement")

    async def answers() -> bool:
        try:
            return await connection.call("GET", "a") == b"1"
        except DeckhandsError:
            return False

    await until(answers, what="answer")
    await connection.aclose()
    assert notices == ["the store ended with SIGKILL; starting it again"]


async def test_the_workers_get_what_they_need(start, tmp_path):
    printing = ("sh", "-c", "env; exec sleep 600")
    cluster, _ = await start(tools=printing, environment={"DECKHANDS_POOLS": "bash,gpu"})
    log = cluster.workers["tools-1"].log
    await until(lambda: "DECKHANDS_NODE_DIR" in log.read_text(), what="environment")
    lines = set(log.read_text().splitlines())
    socket = f":{(tmp_path / 'valkey' / 'password').read_text()}@{tmp_path}/valkey/valkey.sock"
    assert {
        "DECKHANDS_POOLS=bash,gpu",
        f"DECKHANDS_URL=unix://{socket}",
        f"DECKHANDS_CELERY_URL=redis+socket://{socket}?virtual_host=1",
        f"DECKHANDS_NODE={node_name(tmp_path)}",
        f"DECKHANDS_NODE_DIR={tmp_path}/node",
    } <= lines
    assert "HOME" not in {line.partition("=")[0] for line in lines}


async def test_tool_workers_get_no_key_of_a_model(start):
    printing = ("sh", "-c", "env; exec sleep 600")
    keys = {"LLM_API_KEY": "k1", "ANTHROPIC_API_KEY": "k2", "PATH": "/usr/bin:/bin"}
    cluster, _ = await start(controller=printing, tools=printing, environment=keys)
    logs = {name: worker.log for name, worker in cluster.workers.items()}
    for log in logs.values():
        await until(lambda: "DECKHANDS_NODE_DIR" in log.read_text(), what="environment")  # noqa: B023
    assert {"LLM_API_KEY=k1", "ANTHROPIC_API_KEY=k2"} <= set(logs["controller-1"].read_text().splitlines())
    assert "API_KEY" not in logs["tools-1"].read_text()


async def test_slow_starting_worker_is_named_and_joins(tmp_path: Path) -> None:
    notices: list[str] = []
    gate = tmp_path / "gate"
    wait = f"echo waiting for the disk; until [ -e {gate} ]; do sleep 0.05; done; "
    commands = {
        "controller": (sys.executable, "-P", "-m", "controller_worker"),
        "tools": ("sh", "-c", f"{wait} exec {sys.executable} -P -m tool_worker"),
    }
    environment = {"PATH": os.environ["PATH"]}
    spec = ClusterSpec(tmp_path / "c", environment=environment, commands=commands, ready_seconds=0.5)
    spec.directory.mkdir()
    cluster = Cluster(spec, on_notice=notices.append)
    await cluster.start()
    try:
        log = cluster.workers["tools-1"].log
        await until(lambda: log.exists() and "waiting" in log.read_text(), what="start")
        await cluster.until_ready()
        assert any(
            notice.startswith("tools-1 has not started after 0.5 s") and notice.endswith(": waiting for the disk")
            for notice in notices
        ), notices
        await until(lambda: "controller-1 is ready" in notices or len(notices) == 1, what="the other worker")
        gate.touch()
        await until(lambda: "tools-1 is ready" in notices, what="the late worker")
        assert cluster.workers["tools-1"].replaced == 0
    finally:
        await cluster.stop()


async def test_a_worker_that_dies_at_its_start_is_quoted(start):
    failing = ("sh", "-c", "echo no module named x; exit 3")
    _, notices = await start(controller=failing, gives_up=False)
    await until(lambda: notices, what="notice")
    assert notices[0] == "controller-1 ended with status 3; starting it again: no module named x"


async def test_repeatedly_failing_worker_breaks_the_cluster_and_is_quoted(start):
    cluster, _ = await start(controller=("sh", "-c", "echo trying; echo no module named x; exit 3"))
    message = (
        r"controller-1 keeps ending right after its start \(status 3\): no module named x Its log is .*controller-1"
    )
    async with asyncio.timeout(60):
        with pytest.raises(WorkerKeepsFailing, match=message):
            await cluster.until_broken()
        with pytest.raises(WorkerKeepsFailing):
            await cluster.until_ready()


async def test_worker_with_invalid_settings_breaks_the_cluster_at_once(start):
    cluster, notices = await start(controller=("sh", "-c", "echo no such file; exit 2"))
    async with asyncio.timeout(60):
        with pytest.raises(WorkerKeepsFailing, match="no such file"):
            await cluster.until_broken()
    assert (notices, cluster.workers["controller-1"].replaced) == ([], 0)


async def test_a_cluster_that_does_not_give_up_tries_again(start):
    cluster, notices = await start(controller=("false",), gives_up=False)
    await until(lambda: cluster.workers["controller-1"].replaced >= 4, what="fourth try")
    assert set(notices) == {"controller-1 ended with status 1; starting it again"}


async def test_stopping_ends_everything(start):
    cluster, notices = await start()
    pids = [cluster.store.child.pid, *(worker.child.pid for worker in cluster.workers.values())]
    await cluster.stop()
    assert [is_alive(pid) for pid in pids] == [False, False, False]
    assert notices == []


async def test_ending_at_once_spares_only_the_store(start):
    cluster, _ = await start()
    cluster.kill_all()
    await until(lambda: not any(is_alive(worker.child.pid) for worker in cluster.workers.values()), what="end")
    assert is_alive(cluster.store.child.pid)


async def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", CLUSTER, tmp_path], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(pid) for pid in supervisor.stdout.readline().split()]
        assert [is_alive(pid) for pid in pids] == [True, True, True]
        supervisor.kill()
    await until(lambda: not any(is_alive(pid) for pid in pids), what="end of all")


async def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    cluster = Cluster(ClusterSpec(tmp_path / "file"))
    with pytest.raises(UsageError, match="Not a directory"):
        await cluster.start()
    await cluster.stop()


def test_the_node_of_a_directory_is_always_the_same(tmp_path):
    assert node_name(tmp_path) == node_name(Path(str(tmp_path)))
    assert node_name(tmp_path) != node_name(tmp_path / "other")
