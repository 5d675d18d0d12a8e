"""A workspace host as its clients see it: its lifetime, and requests that it refuses."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.workspace_hosts import LIMIT_SECONDS, Gate, main_pid, opened
from tests.polling import until
from tool_worker.errors import HostRefused, WorkspaceUnavailable
from tool_worker.host.server import CLIENT_LIMIT, QUEUE_LIMIT
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.launch.host_launch import wait_until_dead
from tool_worker.workspace.launch.session_programs import SessionPrograms

CONVERSATION = "conversation"

# Speaks the session protocol: the argument `manner` says how badly.
PROGRAM = """
import json, os, socket, sys
connection = socket.socket(fileno=3).makefile("rwb", buffering=0)
for line in connection:
    message = json.loads(line)
    if "interrupt" in message:
        continue
    number, manner = message["call"], message["arguments"]["manner"]
    def answer(call, content):
        connection.write(json.dumps({"call": call, "result": {"content": content}}).encode() + b"\\n")
    if manner == "late":
        answer(number - 1, "of an earlier call")
    if manner == "mute":
        open(message["arguments"]["started"], "w").close()
        continue
    answer(number, f"call {number} of {os.getpid()}")
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    path = tmp_path / CONVERSATION / "workspace"
    path.mkdir(parents=True)
    return path


async def test_host_with_a_running_action_outlives_its_ttl_without_clients(tmp_path: Path, workspace: Path) -> None:
    gate = Gate(workspace, "gate")
    async with opened(tmp_path, ttl_seconds=0.2) as workspaces:
        host = await workspaces.open(CONVERSATION)
        running = asyncio.create_task(host.run(1, "bash", {"command": "sleep 1; echo over > gate; echo done"}))
        while 1 not in (await host.connection.ping()).running:
            await asyncio.sleep(0)
        await workspaces.aclose()
        with pytest.raises(WorkspaceUnavailable):
            await running
        async with asyncio.timeout(60):
            assert await gate.wait() == "over"
        # Nothing runs any more, so its time to live has started.
        assert await wait_until_dead(HostFolder(tmp_path, CONVERSATION), LIMIT_SECONDS)
    async with opened(tmp_path) as workspaces:
        again = await (await workspaces.open(CONVERSATION)).run(1, "bash", {"command": "never"})
        assert (again.is_unknown, again.value["content"]) == (False, "done")


async def test_host_with_a_client_outlives_its_ttl_without_actions(tmp_path: Path, workspace: Path) -> None:
    gate = Gate(workspace, "gate")
    async with opened(tmp_path, ttl_seconds=0.3) as workspaces:
        host = await workspaces.open(CONVERSATION)
        await host.run(1, "bash", {"command": "KEPT=1; (sleep 1; echo over > gate) &"})
        async with asyncio.timeout(60):
            assert await gate.wait() == "over"
        assert (await host.run(2, "bash", {"command": "echo $KEPT"})).value["content"].strip() == "1"


async def test_beyond_its_limit_of_clients_a_host_takes_none(tmp_path: Path) -> None:
    loop, folder = asyncio.get_running_loop(), HostFolder(tmp_path, CONVERSATION)
    async with opened(tmp_path) as workspaces:
        await workspaces.open(CONVERSATION)
        clients = [folder.connect() for _ in range(CLIENT_LIMIT - 1)]
        for client in clients:
            assert await ping(client) == {"protocol": 1}
        beyond = folder.connect()
        async with asyncio.timeout(60):
            assert await loop.sock_recv(beyond, 1) == b""
        for client in (*clients, beyond):
            client.close()


async def test_host_with_a_full_queue_refuses_further_commands(tmp_path: Path, workspace: Path) -> None:
    gate = Gate(workspace, "gate")
    async with opened(tmp_path) as workspaces:
        host = await workspaces.open(CONVERSATION)
        commands = ["read x < gate", *["true"] * QUEUE_LIMIT]
        running = [asyncio.create_task(host.run(n, "bash", {"command": text})) for n, text in enumerate(commands, 1)]
        while len((await host.connection.ping()).running) < len(commands):
            await asyncio.sleep(0)
        with pytest.raises(HostRefused, match="256 commands are waiting") as refused:
            await host.run(1000, "bash", {"command": "touch never"})
        assert refused.value.retryable
        assert (await host.status(1000)).state == "never_started"
        gate.open()
        results = await asyncio.gather(*running)
        assert all(result.value["metadata"]["exit_code"] == 0 for result in results)
        assert not (workspace / "never").exists()


async def test_every_caller_for_a_running_action_gets_its_result(tmp_path: Path, workspace: Path) -> None:
    gate = Gate(workspace, "gate")
    async with opened(tmp_path) as workspaces, opened(tmp_path) as others:
        host, other = await workspaces.open(CONVERSATION), await others.open(CONVERSATION)
        call = {"command": "echo once >> runs; read x < gate; cat runs"}
        first = asyncio.create_task(host.run(1, "bash", call))
        while 1 not in (await other.connection.ping()).running:
            await asyncio.sleep(0)
        second = asyncio.create_task(other.run(1, "bash", call))
        # Served after the request before it, on the same connection.
        assert not await other.connection.retire(may_kill=True)
        gate.open()
        async with asyncio.timeout(20):
            results = await asyncio.gather(first, second)
        assert [result.value["content"] for result in results] == ["once", "once"]


async def test_client_that_reads_nothing_is_disconnected(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with opened(tmp_path) as workspaces:
        host = await workspaces.open(CONVERSATION)
        await host.run(1, "bash", {"command": "head -c 250000 /dev/zero | tr '\\0' x"})
        lazy = HostFolder(tmp_path, CONVERSATION).connect()
        asked = 700
        requests = b"".join(b'{"op":"status","request":%d,"action_id":1}\n' % n for n in range(asked))
        hung_up = select.poll()
        hung_up.register(lazy, 0)  # a hang-up is reported unasked
        async with asyncio.timeout(60):
            await loop.sock_sendall(lazy, requests)
            await until(lambda: bool(hung_up.poll(0)), limit=50.0, what="the end of the connection")
            got = 0
            while chunk := await received(lazy):
                got += len(chunk)
        assert got < asked * 250_000
        lazy.close()
        resident_kb = next(
            int(line.split()[1])
            for line in Path(f"/proc/{main_pid(tmp_path, CONVERSATION)}/status").read_text().splitlines()
            if line.startswith("VmHWM:")
        )
        assert resident_kb < 400_000
        assert (await host.run(2, "bash", {"command": "echo still"})).value["content"] == "still"


async def test_answer_to_an_abandoned_call_answers_no_other(tmp_path: Path) -> None:
    async with opened(tmp_path, programs=program(tmp_path)) as workspaces:
        host = await workspaces.open(CONVERSATION)
        first = await host.run(1, "fake", {"manner": "well"})
        second = await host.run(2, "fake", {"manner": "late"})
        assert first.value["content"].startswith("call 1 of ")
        assert second.value["content"] == first.value["content"].replace("call 1", "call 2")


async def test_session_ignoring_an_interrupt_is_replaced(tmp_path: Path) -> None:
    started = tmp_path / "started"
    async with opened(tmp_path, programs=program(tmp_path)) as workspaces:
        host = await workspaces.open(CONVERSATION)
        first = await host.run(1, "fake", {"manner": "well"})
        mute = asyncio.create_task(host.run(2, "fake", {"manner": "mute", "started": str(started)}))
        waiting = asyncio.create_task(host.run(3, "fake", {"manner": "well"}))
        while not started.exists() or 3 not in (await host.connection.ping()).running:
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            assert await host.interrupt(2)
            assert (await mute).value["is_error"]
            answered = (await waiting).value["content"]
        assert answered.startswith("call 3 of ")
        assert answered.split()[-1] != first.value["content"].split()[-1]


async def test_the_host_itself_is_killed_later_than_what_it_starts(tmp_path: Path) -> None:
    async with opened(tmp_path) as workspaces:
        host = await workspaces.open(CONVERSATION)
        ours = int(Path("/proc/self/oom_score_adj").read_text())
        for number in (1, 2):
            shown = await host.run(number, "bash", {"command": "cat /proc/self/oom_score_adj", "is_static": True})
            assert int(shown.value["content"]) == min(1000, ours + 200)
            pid = main_pid(tmp_path, CONVERSATION)
            assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == ours


def program(folder: Path) -> SessionPrograms:
    path = folder / "program.py"
    path.write_text(PROGRAM)
    return SessionPrograms({"fake": [sys.executable, "-I", "-S", str(path)]})


async def ping(client: socket.socket) -> dict[str, Any]:
    """Ask a host by a connection of our own; empty: it has closed the connection."""
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(client, b'{"op":"ping","request":1}\n')
        answer = await loop.sock_recv(client, 65536)
    except OSError:
        return {}
    return {"protocol": json.loads(answer)["protocol"]} if answer else {}


async def received(client: socket.socket) -> bytes:
    try:
        return await asyncio.get_running_loop().sock_recv(client, 2**20)
    except OSError:
        return b""
