"""A list of allowed hosts at work: commands, sessions and servers reach what is on it, and learn what is not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.events import ConversationCreated, WorkspaceSpec
from broker.contract.observations import CmdOutputObservation
from broker.coordination.action_streams import ActionClaimed, ActionDelivery
from broker.log.event_log import EventLog
from broker.runtime.errors import UsageError
from broker.store.store import Store
from broker.tools.mcp_config import McpServerSpec
from tests.integration.test_mcp import offering, program
from tests.integration.workspace_hosts import LIMIT_SECONDS, Terminal, answer, client, gone, opened
from tests.polling import until
from tests.programs import command_of
from tool_worker.errors import EgressRefused, WorkspaceConflict
from tool_worker.settings import load_tool_settings
from tool_worker.worker.executor import Executor
from tool_worker.workspace.launch.egress_gate import EgressGate
from tool_worker.workspace.launch.host_folder import HostFolder
from tool_worker.workspace.launch.host_launch import wait_until_dead

ADDRESS = "127.0.0.2"
GATE = EgressGate(private=(f"{ADDRESS}/32",))
FETCH = "import urllib.request as web; print(web.urlopen('http://{}/').read().decode())"


class Site:
    """A web server that says hello, after a wait if that is asked for."""

    def __init__(self) -> None:
        self.host = ""
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")
            self.is_asked.set()
            await self.may_answer.wait()
            writer.write(b" all\n")
            await writer.drain()
        finally:
            writer.close()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    async with await asyncio.start_server(made.serve, ADDRESS, 0) as server:
        made.host = f"{ADDRESS}:{server.sockets[0].getsockname()[1]}"
        yield made


def proxies() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.cmdline()[1:4] == ["-I", "-m", "tool_worker.sandbox.egress"] and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


async def proxy_of(conversation_id: str) -> psutil.Process:
    """Return the proxy of a workspace, once the process that was started has become one."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = [process for process in proxies() if command_of(process)[4:] == [conversation_id]]
        return len(found) == 1

    await until(is_there)
    return found[0]


async def test_command_reaches_listed_hosts_and_reads_about_others(tmp_path: Path, site: Site) -> None:
    async with opened(tmp_path, sandbox="bwrap", gate=GATE) as workspaces:
        workspace = await workspaces.open("reaching", WorkspaceSpec(allow=(site.host,)))
        run = Terminal(workspace)
        assert (await run(f"curl -sS http://{site.host}/")).content == "hello all"
        assert (await run(f"curl -sSp http://{site.host}/")).content == "hello all"
        assert (await run(f'python3 -c "{FETCH.format(site.host)}"')).content == "hello all"
        refused = await run("curl -sS https://elsewhere.test/")
        assert "403" in refused.content
        why = "elsewhere.test:443 is not among the hosts that this workspace may reach (its `allow`)."
        assert refused.fields["refused"] == [why]
        assert "refused" not in (await run("true")).fields
        # Around the proxy there is nothing.
        assert (await run(f"curl -sS --noproxy '*' http://{site.host}/")).exit_code == 7
        assert json.loads((tmp_path / "reaching" / "host" / "egress.log").read_text())["why"] == why
        process = await proxy_of("reaching")
    await gone(process.pid)


async def test_proxy_keeps_only_hosts_with_an_attached_worker(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap", gate=GATE, ttl_seconds=0.2) as workspaces:
        await workspaces.open("resting", WorkspaceSpec(allow=("elsewhere.test",)))
        process = await proxy_of("resting")
        await workspaces.aclose()
        assert await wait_until_dead(HostFolder(tmp_path, "resting"), LIMIT_SECONDS)
    await gone(process.pid)


async def test_refusals_are_in_the_observation_and_counted(tmp_path: Path, memory_store: Store) -> None:
    log = EventLog(memory_store)
    await log.create(ConversationCreated(conversation_id="told"))
    async with opened(tmp_path, sandbox="bwrap", gate=GATE) as workspaces:
        executor = Executor(log, workspaces, worker_id="tool-1")

        async def run(command: str) -> str:
            await log.append("told", [CmdRunAction(command=command, blocking=True, timeout=30)])
            action = (await log.read("told"))[-1]
            spec = WorkspaceSpec(allow=("mirror.test",))
            delivery = ActionDelivery("told", action.id, await log.load_entry("told", action.id), spec, "")
            await executor.execute(delivery, ActionClaimed(1))
            observed = (await log.read("told"))[-1]
            assert isinstance(observed, CmdOutputObservation)
            return observed.content

        told = await run("curl -s https://a.test/; curl -s http://b.test/; curl -s http://b.test/")
        assert told.endswith(
            "[The proxy of this workspace refused:"
            "\n- a.test:443 is not among the hosts that this workspace may reach (its `allow`)."
            "\n- b.test:80 is not among the hosts that this workspace may reach (its `allow`).]"
        )
        assert executor.refusals == 2
        assert await run("echo on") == "on"
        assert executor.refusals == 2


async def test_a_download_goes_on_when_its_tool_worker_is_killed(tmp_path: Path, site: Site) -> None:
    async with opened(tmp_path, sandbox="bwrap", gate=GATE) as workspaces:
        await workspaces.open("download", WorkspaceSpec(allow=(site.host,)))
        process = await proxy_of("download")
        site.may_answer.clear()
        worker = client(tmp_path, "bwrap", "download", 7, f"curl -sS http://{site.host}/")
        await site.is_asked.wait()
        os.killpg(worker.pid, signal.SIGKILL)
        await asyncio.to_thread(worker.communicate)
        site.may_answer.set()
        collected = await answer(client(tmp_path, "bwrap", "download", 7, "not run again"))
        assert collected["content"] == "hello all"
        assert (await proxy_of("download")).pid == process.pid


async def test_dead_proxy_is_replaced_while_programs_wait(tmp_path: Path, site: Site) -> None:
    async with opened(tmp_path, sandbox="bwrap", gate=GATE) as workspaces:
        await workspaces.open("replaced", WorkspaceSpec(allow=(site.host,)))
        first = await proxy_of("replaced")
        first.kill()
        await gone(first.pid)

        async def is_replaced() -> bool:
            await workspaces.open("replaced")
            return any(command_of(process)[4:] == ["replaced"] for process in proxies())

        await until(is_replaced)
        workspace = await workspaces.open("replaced")
        assert (await Terminal(workspace)(f"curl -sS http://{site.host}/")).content == "hello all"
        assert (await proxy_of("replaced")).pid != first.pid


async def test_a_node_gives_no_more_than_its_operator_says(tmp_path: Path) -> None:
    gate = load_tool_settings({"DECKHANDS_EGRESS": "*.example.com, pypi.test:443"}).gate
    async with opened(tmp_path, sandbox="bwrap", gate=gate) as workspaces:
        with pytest.raises(EgressRefused, match=r"not allow workspaces the host other.test \(DECKHANDS_EGRESS\)"):
            await workspaces.open("greedy", WorkspaceSpec(allow=("a.example.com", "other.test")))
        with pytest.raises(EgressRefused, match="the whole network"):
            await workspaces.open("whole", WorkspaceSpec(network=True))
        await workspaces.open("modest", WorkspaceSpec(allow=("*.a.example.com:443", "pypi.test:443")))
        with pytest.raises(WorkspaceConflict, match=r"without network but \*.a.example.com:443, pypi.test:443"):
            await workspaces.open("modest", WorkspaceSpec(allow=("a.example.com",)))
    async with opened(tmp_path / "none", sandbox="none", gate=gate) as workspaces:
        with pytest.raises(EgressRefused, match="has no effect without a sandbox"):
            await workspaces.open("open", WorkspaceSpec(allow=("a.example.com",)))


def test_settings_that_cannot_be_used() -> None:
    assert load_tool_settings({}).gate == EgressGate()
    assert load_tool_settings({"DECKHANDS_EGRESS": "none"}).gate.ceiling == ()
    assert load_tool_settings({"DECKHANDS_EGRESS_PRIVATE": "10.0.0.0/8, fd00::/8"}).gate.private == (
        "10.0.0.0/8",
        "fd00::/8",
    )
    for name, value in (("EGRESS", "http://a.test"), ("EGRESS_PRIVATE", "10.0.0.1/8"), ("EGRESS_BYTES", "0")):
        with pytest.raises(UsageError, match=f"DECKHANDS_{name} "):
            load_tool_settings({f"DECKHANDS_{name}": value})


async def test_an_mcp_server_reaches_what_its_entry_names(tmp_path: Path, site: Site) -> None:
    spec = program(allow=(site.host,))
    async with offering(spec, tmp_path, "bwrap", gate=GATE) as example:
        assert await fetched(example, f"http://{site.host}/") == "hello all\n"
        assert "403" in await fetched(example, "http://elsewhere.test/")
        process = await proxy_of("example")
    await gone(process.pid)


async def fetched(example: Any, address: str) -> str:
    result = await example.result("fetch", address=address)
    return str(result["content"][0]["text"])


def test_an_entry_of_a_server_names_hosts_that_make_sense() -> None:
    with pytest.raises(ValueError, match="allow is for a command without network"):
        program(allow=("a.test",), network=True)
    with pytest.raises(ValueError, match="allow is for a command without network"):
        McpServerSpec(name="x", url="http://a.test", allow=("a.test",))
    with pytest.raises(ValueError, match="the usual notation"):
        program(allow=("127.1",))


@asynccontextmanager
async def with_kernel(root: Path, allow: tuple[str, ...]) -> AsyncIterator[Any]:
    from tool_worker.workspace.launch.session_programs import find_session_programs

    programs = find_session_programs(["ipython"])
    async with opened(root, sandbox="bwrap", gate=GATE, programs=programs) as workspaces:
        yield await workspaces.open("kernel", WorkspaceSpec(allow=allow))


async def test_a_cell_reaches_what_is_on_the_list(tmp_path: Path, site: Site) -> None:
    async with with_kernel(tmp_path, (site.host,)) as workspace:
        result = await workspace.run(1, "ipython", {"code": FETCH.format(site.host), "timeout": 60})
        assert "hello all" in result.value["content"], sys.executable
