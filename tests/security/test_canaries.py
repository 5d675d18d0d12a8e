"""A secret that commands use and print in every form: no sink of ours has it afterwards."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import Action, ConversationCreated, Event, WorkspaceSpec
from broker.contract.file_events import FileReadAction
from broker.contract.observations import CmdOutputObservation
from broker.coordination.action_streams import ActionClaimed, ActionDelivery
from broker.log.event_log import EventLog
from broker.secrets.masking import MASK, find_forms
from broker.secrets.secrets import Secrets
from broker.store.store import Store
from deckhands.client.client import Client
from deckhands.client.reading.rendering import Renderer
from deckhands.client.runs.records import render_event_line
from tests.integration.workspace_hosts import opened
from tests.stores import RealServer
from tool_worker.worker.executor import Executor
from tool_worker.workspace.workspaces import Workspaces

CANARY = "c4n4ry/Pa+ss w0rd=9f8e7d6c"
CID = "conversation"


@dataclass
class Bench:
    """A conversation with a secret, on a real store and in a real workspace."""

    store: Store
    log: EventLog
    executor: Executor
    root: Path

    async def run(self, action: Action) -> Event:
        """Append an action as it is, carry it out, and return its observation."""
        await EventLog(self.store).append(CID, [action])
        action = (await self.log.read(CID))[-1]
        entry = await self.log.load_entry(CID, action.id)
        await self.executor.execute(ActionDelivery(CID, action.id, entry, WorkspaceSpec(), ""), ActionClaimed(1))
        return (await self.log.read(CID))[-1]

    async def output(self, command: str) -> str:
        observation = await self.run(CmdRunAction(command=command))
        assert isinstance(observation, CmdOutputObservation)
        return observation.content


@pytest.fixture
async def bench(valkey_store: Store, tmp_path: Path) -> AsyncIterator[Bench]:
    secrets = Secrets(valkey_store, lambda: bytes(32))
    await secrets.put(CID, "TOKEN", CANARY)
    log = EventLog(valkey_store, secrets)
    await log.create(ConversationCreated(conversation_id=CID))
    async with opened(tmp_path / "node", sandbox="bwrap") as workspaces:
        yield Bench(valkey_store, log, Executor(log, workspaces, worker_id="tool-1"), tmp_path / "node")


COMMANDS = {
    "plain": 'echo "$TOKEN"',
    "reversed": 'echo "$TOKEN" | rev',
    "base64": 'printf %s "$TOKEN" | base64 -w0',
    "base64 of a header": 'printf "user:%s" "$TOKEN" | base64 -w0',
    "wrapped base64": 'printf "xx%s%s" "$TOKEN" "$TOKEN" | base64 -w 20',
    "hex": 'printf %s "$TOKEN" | od -An -v -tx1 | tr -d " \\n"',
    "json": "python3 -c \"import json, os; print(json.dumps({'t': os.environ['TOKEN']}))\"",
    "url": "python3 -c \"import os, urllib.parse as u; print(u.quote(os.environ['TOKEN'], safe=''))\"",
    "shell": 'printf "%q\\n" "$TOKEN"; set -x; : "$TOKEN"; set +x; declare -p TOKEN',
    "environment": "env; echo TOKEN",
    "a file": 'echo "$TOKEN" > kept; cat kept',
    "a long output": 'for i in $(seq 3000); do echo "line $i $TOKEN"; done',
    "an error": "python3 -c \"import os; raise ValueError(os.environ['TOKEN'])\"",
    "where we are": 'mkdir -p "x$(echo "$TOKEN" | tr / _)"; cd "x$(echo "$TOKEN" | tr -d /)" || echo "$TOKEN"',
}


def leaks(text: bytes) -> list[str]:
    return [form for form in find_forms(CANARY) if form.encode() in text]


async def everything_in(store: Store) -> bytes:
    """Return every key and value, as they are and with events decoded."""
    call = store.connection.call
    found = []
    for key in await call("KEYS", "*"):
        kind = (
            (await call("TYPE", key)).decode()
            if isinstance(await call("TYPE", key), bytes)
            else await call("TYPE", key)
        )
        commands = {
            "string": ("GET", key),
            "hash": ("HGETALL", key),
            "set": ("SMEMBERS", key),
            "stream": ("XRANGE", key, "-", "+"),
            "zset": ("ZRANGE", key, 0, -1, "WITHSCORES"),
        }
        found.append(repr((key, await call(*commands[kind]))).encode())
    return b"\n".join(found)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
async def test_secrets_in_output_are_masked(bench: Bench, command: str) -> None:
    content = await bench.output(command)
    assert MASK in content
    assert leaks(content.encode()) == []


@pytest.mark.parametrize("kept", [8, len(CANARY) - 1])
async def test_secret_cut_by_truncation_is_masked(bench: Bench, kept: int) -> None:
    """Of more than 30,000 characters the first 15,000 are kept."""
    command = f"python3 -c \"import os; print('x' * {15_000 - kept} + os.environ['TOKEN'] + 'y' * 40_000)\""
    content = await bench.output(command)
    assert "[... Observation truncated due to length ...]" in content
    assert CANARY[:8] not in content


async def test_no_sink_has_it(
    bench: Bench, valkey_server: RealServer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    for command in COMMANDS.values():
        await bench.output(command)
    # The next command is a new process: the secret is not in the shell's environment any more.
    assert await bench.output("env | grep -c c4n4ry; echo over") == "0\nover"
    read = await bench.run(FileReadAction(path="/workspace/kept"))
    assert MASK in read.content
    async with Client(bench.store) as client:
        events = await client.events(CID, is_whole=True)
        sinks = {
            "store": await everything_in(bench.store),
            "events": json.dumps([event.wire() for event in events], default=str, ensure_ascii=False).encode(),
            "export": "\n".join(render_event_line(event) for event in events).encode(),
            "terminal": "\n".join(
                line for event in events for line in Renderer(is_coloured=False).lines(event)
            ).encode(),
            "logs": caplog.text.encode(),
            "append-only file": b"".join(path.read_bytes() for path in valkey_server.folder.rglob("*.aof")),
        }
        assert all(sink for name, sink in sinks.items() if name != "logs")
        assert {name: leaks(sink) for name, sink in sinks.items() if leaks(sink)} == {}
    with (tmp_path / "node" / CID / "host" / "host.log").open() as host_log:
        assert leaks(host_log.read().encode()) == []


async def test_a_failure_of_ours_does_not_tell_it(
    bench: Bench, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Broken(Workspaces):
        async def open(self, conversation_id: str, *_: object, **__: object) -> object:
            raise RuntimeError(f"cannot open for {CANARY}")

    bench.executor = Executor(bench.log, Broken(tmp_path, sandbox="none"), worker_id="tool-1")
    answer = await bench.run(CmdRunAction(command="true"))
    assert answer.content == f"The action could not be run: RuntimeError: cannot open for {MASK}"
    assert f"RuntimeError: cannot open for {MASK}" in caplog.text
    assert leaks(caplog.text.encode()) == []
