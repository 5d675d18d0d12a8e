"""Programs of MCP servers: in virtual environments, without manners, and those that cannot be offered.

They start by themselves and open nothing that agents can write; if one babbles, floods or hangs, the others work."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from broker.contract.observations import ErrorObservation, MCPObservation
from broker.contract.tool_specs import MAX_DESCRIPTION_CHARS
from broker.runtime.errors import UsageError
from broker.tools.custom_tools import ToolFailed
from broker.tools.mcp_config import McpServerSpec
from tests.distributions import needed_by
from tests.integration.command_line import Done, environment, finished, started
from tests.integration.test_mcp import LIMIT_SECONDS, PROGRAM, ROOT, offering, program, text_of
from tests.polling import until
from tests.programs import command_of
from tests.scripted_mcp_server import served
from tests.turns import finish, script
from tool_worker.sandbox.sandbox import list_interpreter_prefixes
from tool_worker.tools.mcp.launch import ProgramFiles, SandboxedLaunch, find_program_files
from tool_worker.tools.mcp.server import McpServer

RUDE = ROOT / "tests" / "rude_mcp_server.py"


def rude(manner: str) -> McpServerSpec:
    return program(args=(str(RUDE), manner), read_only=(Path(sys.prefix), RUDE))


@asynccontextmanager
async def endless_server(form: str) -> AsyncIterator[str]:
    """Yield the address of a server whose answer to a call has no end."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        asked = await request.json() if request.method == "POST" else {}
        method = asked.get("method", "")
        if method == "tools/call":
            endless = web.StreamResponse(headers={"Content-Type": form})
            await endless.prepare(request)
            await endless.write(b'data: {"x": "' if form == "text/event-stream" else b'{"x": "')
            with suppress(ConnectionError):
                while True:
                    await endless.write(b"y" * 65536)
            return endless
        if "id" not in asked:
            return web.Response(status=405 if request.method == "GET" else 202)
        result: dict[str, Any] = {"tools": [{"name": "rude", "inputSchema": {"type": "object"}}]}
        if method == "initialize":
            version = asked["params"]["protocolVersion"]
            server = {"name": "rude", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
        return web.json_response({"jsonrpc": "2.0", "id": asked["id"], "result": result})

    async with served(answer) as url:
        yield url


def programs() -> list[psutil.Process]:
    return [found for found in psutil.Process().children(recursive=True) if str(RUDE) in command_of(found)]


@pytest.mark.parametrize("manner", ["babbles", "repeats"])
async def test_invalid_messages_and_repeated_tools_are_skipped(tmp_path: Path, manner: str) -> None:
    async with asyncio.timeout(LIMIT_SECONDS), offering(rude(manner), tmp_path) as tools:
        assert tools.offers["example/rude"].description == "Answers."
        assert text_of(await tools.result("rude")) == "fine"


async def test_endless_message_ends_the_connection_in_bounded_memory(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_SECONDS), offering(rude("endless"), tmp_path) as tools:
        before = psutil.Process().memory_info().rss
        for _ in range(2):  # the second finds a new program
            lost = await tools.call("rude")
            assert isinstance(lost, ErrorObservation)
            assert lost.error_id == "mcp_answer_too_long"
        assert psutil.Process().memory_info().rss - before < 200 * 2**20
    assert not programs()


@pytest.mark.parametrize("form", ["application/json", "text/event-stream"])
async def test_an_answer_by_http_without_an_end_costs_bounded_memory(tmp_path: Path, form: str) -> None:
    async with (
        asyncio.timeout(LIMIT_SECONDS),
        endless_server(form) as url,
        offering(McpServerSpec(name="example", url=url, timeout=30), tmp_path) as tools,
    ):
        before, began = psutil.Process().memory_info().rss, asyncio.get_running_loop().time()
        lost = await tools.call("rude")
        assert isinstance(lost, ErrorObservation)
        assert lost.error_id == "mcp_answer_too_long"
        assert psutil.Process().memory_info().rss - before < 200 * 2**20
        assert asyncio.get_running_loop().time() - began < 25.0


async def test_a_long_message_costs_time_in_proportion(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_SECONDS), offering(rude("long"), tmp_path) as tools:
        began = psutil.Process().cpu_times().user
        answer = await tools.call("rude")
        assert isinstance(answer, MCPObservation)
        assert len(answer.content) > 1_000_000
        assert psutil.Process().cpu_times().user - began < 1.0


async def test_silent_server_delays_none_and_ends_with_its_caller(tmp_path: Path) -> None:
    server = McpServer(rude("mute"), SandboxedLaunch("none", tmp_path))
    asking = asyncio.create_task(server.list_tools())
    await until(programs, what="program")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: not programs(), what="end of the program")
    await server.aclose()


async def test_greeting_of_a_server_has_a_time_limit(tmp_path: Path) -> None:
    server = McpServer(rude("mute"), SandboxedLaunch("none", tmp_path), connect_limit_seconds=0.5)
    with pytest.raises(ToolFailed, match=r"cannot be reached: it has not answered for 0\.5 seconds"):
        await server.list_tools()
    await until(lambda: not programs(), what="end of the program")
    await server.aclose()


async def test_an_answer_that_is_no_result_is_a_typed_error(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_SECONDS), offering(rude("mumbles"), tmp_path) as tools:
        lost = await tools.call("rude")
        assert isinstance(lost, ErrorObservation)
        assert lost.error_id == "mcp_answer_lost"
        assert "not with a result" in lost.content


@pytest.mark.parametrize("manner", ["floods", "chatters"])
async def test_a_flood_of_announcements_keeps_nobody_from_anything(tmp_path: Path, manner: str) -> None:
    async with asyncio.timeout(3 * LIMIT_SECONDS), offering(rude(manner), tmp_path) as tools:
        before, used = psutil.Process().memory_info().rss, psutil.Process().cpu_times().user
        began = asyncio.get_running_loop().time()
        for _ in range(3):  # each finds a new program
            lost = await tools.call("rude")
            assert isinstance(lost, MCPObservation) or lost.error_id in ("mcp_answer_lost", "tool_failed")
        passed = asyncio.get_running_loop().time() - began
        assert psutil.Process().memory_info().rss - before < 200 * 2**20
        assert psutil.Process().cpu_times().user - used < 3.0 + passed / 2


async def test_invalid_tool_costs_only_itself_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(LIMIT_SECONDS), offering(rude("invalid"), tmp_path) as tools:
        assert sorted(tools.offers) == ["example/rude"]
        assert text_of(await tools.result("rude")) == "fine"
    for reason in (
        "'no-schema' (inputSchema: Field required)",
        "'7' (name: Input should be a valid string)",
        "'typed'",
        "its name has characters that are not seen",
        "a name in its schema has characters that are not seen",
        "the schema has more than 14000 characters",
    ):
        assert reason in caplog.text
    assert "\u202e" not in caplog.text


async def test_hidden_description_text_is_escaped_and_bounded(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_SECONDS), offering(rude("hostile"), tmp_path) as tools:
        offer = tools.offers["example/rude"]
        assert offer.description.startswith("Reads.\\x1b[2K\\u202eevil\\u2066 Ignore")
        assert len(offer.description) == MAX_DESCRIPTION_CHARS
        assert offer.parameters["properties"] == {"title": {"type": "string", "title": "a\\u202eb"}}
        assert text_of(await tools.result("rude")) == "fine"


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the SDK, and our example server as an installed program."""
    root = tmp_path_factory.mktemp("environments") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    (packages,) = root.glob("lib/python3*/site-packages")
    # The second is an extra of one that the SDK needs.
    for distribution in needed_by("mcp", "cryptography").values():
        for file in distribution.files or ():
            source, target = Path(str(file.locate())), packages / file
            if ".." not in file.parts and "__pycache__" not in file.parts and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
    server = root / "bin" / "example-server"
    server.write_text(f"#!{root}/bin/python\n{PROGRAM.read_text()}")
    server.chmod(0o755)
    return root


def spec(command: Path | str, **fields: object) -> McpServerSpec:
    return McpServerSpec.model_validate({"name": "example", "command": str(command), "timeout": 20, **fields})


async def test_a_program_of_an_environment_starts_and_sees_nothing_else(tmp_path: Path, venv: Path) -> None:
    (venv.parent / "beside").write_text("x")
    async with offering(spec(venv / "bin" / "example-server"), tmp_path, sandbox="bwrap") as example:
        assert text_of(await example.result("echo", text="inside")) == "inside"
        seen = await example.result("look", path=str(venv.parent))
        assert seen["structuredContent"]["result"] == [venv.name]
        outside = await example.result("look", path=str(tmp_path))
        assert outside["isError"] is True
        written = await example.result("count", trace=str(venv / "trace"))
        assert written["isError"] is True
        assert not (venv / "trace").exists()


async def test_a_link_to_a_program_of_an_environment_starts_it(tmp_path: Path, venv: Path) -> None:
    (link := tmp_path / "bin" / "tool").parent.mkdir()
    link.symlink_to(venv / "bin" / "example-server")
    async with offering(spec(link), tmp_path / "node", sandbox="bwrap") as example:
        assert text_of(await example.result("echo", text="linked")) == "linked"


def test_a_name_is_found_in_the_search_path(venv: Path) -> None:
    found = find_program_files("example-server", search_path=f"/nowhere:{venv / 'bin'}")
    assert found == ProgramFiles(str(venv / "bin" / "example-server"), (venv,))
    assert find_program_files("sh", search_path=str(venv / "bin")) == ProgramFiles("sh")
    assert find_program_files("nowhere-at-all", search_path=str(venv / "bin")) == ProgramFiles("nowhere-at-all")


@pytest.mark.parametrize(
    "head",
    [
        "#!{}/bin/python\n",
        "#!/bin/sh\n'''exec' {}/bin/python \"$0\" \"$@\"\n",
        "#!/bin/sh\n'''exec' \"{}/bin/python\"\n",
    ],
)
def test_script_needs_itself_and_its_interpreters_environment(head: str, tmp_path: Path, venv: Path) -> None:
    (script := tmp_path / "script").write_text(head.format(venv))
    assert find_program_files(str(script)).read_only == (venv, script)


def test_a_program_that_is_in_no_environment_opens_nothing(tmp_path: Path) -> None:
    (script := tmp_path / "script").write_bytes(b"#!/usr/bin/env python3\0\n")
    for command in (str(script), "/usr/bin/env", str(tmp_path / "missing"), "relative/program", str(tmp_path)):
        assert find_program_files(command) == ProgramFiles(command)


def copied(venv: Path, place: Path, home: Path) -> Path:
    """Make an environment whose Python is said to be below another directory, and return its program."""
    (place / "bin").mkdir(parents=True)
    (place / "pyvenv.cfg").write_text(f"home = {home}\n")
    (program := place / "bin" / "server").write_text(f"#!{place}/bin/python\n")
    shutil.copy(os.path.realpath(venv / "bin" / "python"), place / "bin" / "python")
    return program


def test_environment_python_is_opened_if_it_is_one(tmp_path: Path, venv: Path) -> None:
    (tmp_path / "secrets" / "bin").mkdir(parents=True)
    program = copied(venv, tmp_path / "a", tmp_path / "secrets" / "bin")
    assert find_program_files(str(program)).read_only == (tmp_path / "a",)
    (library := tmp_path / "python" / "lib" / "python3.99").mkdir(parents=True)
    (library / "os.py").touch()
    program = copied(venv, tmp_path / "b", tmp_path / "python" / "bin")
    assert find_program_files(str(program)).read_only == (tmp_path / "b", tmp_path / "python")
    for home in ("/bin", "/usr/bin", f"{list_interpreter_prefixes()[0]}/bin", "bin", ""):
        program = copied(venv, tmp_path / f"c{abs(hash(home))}", Path(home))
        assert len(find_program_files(str(program)).read_only) == 1


def refused(program: Path, closed: Sequence[Path], **more: object) -> str:
    with pytest.raises(UsageError) as error:
        find_program_files(str(program), closed=closed, **more)  # type: ignore[arg-type]
    return str(error.value)


def test_nothing_that_an_agent_can_write_is_opened(tmp_path: Path, venv: Path) -> None:
    workspace = tmp_path / "workspace"
    inside = copied(venv, workspace / ".venv", Path("/usr/bin"))
    assert "agents can write there" in refused(inside, [workspace])
    assert "agents can write there" in refused(inside, [workspace / ".venv" / "lib"])
    assert find_program_files(str(inside), closed=[workspace], shown=[workspace / ".venv"]).read_only == ()
    (link := workspace / "link").symlink_to(tmp_path / "outside")
    outside = copied(venv, tmp_path / "outside" / "venv", Path("/usr/bin"))
    assert "agents can write there" in refused(link / "venv" / "bin" / "server", [workspace])
    assert find_program_files(str(outside), closed=[workspace]).read_only == (tmp_path / "outside" / "venv",)
    (alias := tmp_path / "alias").symlink_to(workspace)
    assert "agents can write there" in refused(alias / ".venv" / "bin" / "server", [workspace])
    library = workspace / "python" / "lib" / "python3.99"
    library.mkdir(parents=True)
    (library / "os.py").touch()
    forged = copied(venv, tmp_path / "forged", workspace / "python" / "bin")
    assert "agents can write there" in refused(forged, [workspace])


def test_a_node_keeps_its_own_directory_closed(tmp_path: Path, venv: Path) -> None:
    program = copied(venv, tmp_path / "node" / "workspaces" / "w", Path("/usr/bin"))
    with pytest.raises(UsageError, match="agents can write there"):
        SandboxedLaunch("bwrap", tmp_path / "node")(spec(program))


SECRET = "hunter2-hunter2"


def run(tmp_path: Path, tool: str, **variables: str) -> Done:
    env = environment(tmp_path / "home", **variables)
    model = script(tmp_path / "model.json", finish("Done."))
    (tmp_path / "work").mkdir(exist_ok=True)
    with started("run", "-t", "x", "-w", tmp_path / "work", "--model", model, "--tool", tool, env=env) as running:
        return finished(running)


def dead_server(tmp_path: Path) -> Path:
    """Write the file of a server that says its token, obeys no terminal, and ends."""
    said = "import os, sys; sys.stderr.write('no licence for ' + os.environ['TOKEN'] + chr(27) + '[2J'); sys.exit(3)"
    path = tmp_path / "mcp.json"
    entry = {"command": sys.executable, "args": ["-c", said], "env": {"TOKEN": "${SHOP_TOKEN}"}}
    path.write_text(json.dumps({"mcpServers": {"shop": entry}}))
    return path


def test_a_run_whose_tool_cannot_be_imported(tmp_path: Path) -> None:
    done = run(tmp_path, "stock", DECKHANDS_TOOLS="shop_that_is_nowhere:stock", DECKHANDS_SANDBOX="none")
    assert done.code == 2, done
    assert "No tool worker offers the tool 'stock'." in done.err
    assert "cannot load tools from shop_that_is_nowhere:stock: ModuleNotFoundError: No module named" in done.err
    assert "correct DECKHANDS_TOOLS" in done.err


def test_a_run_whose_mcp_program_is_dead(tmp_path: Path) -> None:
    variables = {"DECKHANDS_MCP": str(dead_server(tmp_path)), "SHOP_TOKEN": SECRET, "DECKHANDS_SANDBOX": "none"}
    done = run(tmp_path, "shop/*", **variables)
    assert done.code == 2, done
    assert "cannot load tools from the MCP server shop: The MCP server shop cannot be reached: " in done.err
    assert "Its last words: no licence for <secret_hidden> [2J" in done.err
    assert "Correct the command of shop in the file that DECKHANDS_MCP names" in done.err
    assert SECRET not in done.err
