"""Tools that a tool worker cannot offer: the person who asks for one reads why, at once, by every way."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from broker.tools.tool_failures import ToolFailure
from deckhands import Client
from tests.integration.command_line import Done, cluster, deckhands, environment, finished, started
from tests.polling import until
from tests.turns import finish, script
from tool_worker.tools.mcp.config import McpServerSpec
from tool_worker.tools.mcp.launch import SandboxedLaunch
from tool_worker.tools.mcp.servers import McpServers
from tool_worker.tools.offered import OfferedTools

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


def test_a_run_whose_mcp_file_cannot_be_used(tmp_path: Path) -> None:
    done = run(tmp_path, "shop/*", DECKHANDS_MCP=str(tmp_path / "missing.json"), DECKHANDS_SANDBOX="none")
    assert done.code == 1, done
    assert "missing.json is not a list of MCP servers: FileNotFoundError" in done.err


async def _refused(url: str) -> str:
    async with await Client.connect(url) as client:
        with pytest.raises(UsageError) as refused:
            await client.submit("x", tools=["shop/sell"])
    return str(refused.value)


@pytest.mark.soak
def test_a_cluster_says_what_it_cannot_offer_everywhere(tmp_path: Path) -> None:
    variables = {"DECKHANDS_MCP": str(dead_server(tmp_path)), "SHOP_TOKEN": SECRET}
    variables |= {"DECKHANDS_TOOLS": "shop_that_is_nowhere:stock"}
    env = environment(tmp_path)
    with cluster(tmp_path, "--sandbox", "none", **variables) as running:
        assert running.stderr is not None
        told = [next(line for line in running.stderr if "gets no tool" in line) for _ in range(2)]
        submitted = deckhands("submit", "-t", "x", "--tool", "stock", env=env)
        in_python = asyncio.run(_refused((tmp_path / "cluster" / "url").read_text().strip()))
        listed = deckhands("tools", "--list", env=env)
        doctor = deckhands("doctor", env=env)
    for text in ("".join(told), submitted.err + in_python, listed.err, doctor.out):
        assert "shop_that_is_nowhere:stock: ModuleNotFoundError" in text
        assert "the MCP server shop: The MCP server shop cannot be reached" in text
        assert SECRET not in text
    assert submitted.code == 2
    assert "found   workers report" in doctor.out


async def test_a_server_that_comes_back_is_no_failure_any_more(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    program = Path(__file__).resolve().parents[1] / "example_mcp_server.py"
    text = f"import os, sys; os.path.exists({str(gate)!r}) or sys.exit('not yet'); import runpy; "
    text += f"runpy.run_path({str(program)!r}, run_name='__main__')"
    spec = McpServerSpec(name="example", command=sys.executable, args=("-c", text))
    offered, reports = OfferedTools(()), list[tuple[ToolFailure, ...]]()

    async def report() -> None:
        reports.append(offered.failures)

    servers = McpServers([spec], offered, SandboxedLaunch("none", tmp_path), report=report)
    offering = asyncio.create_task(servers.offer(lambda _: asyncio.sleep(0)))
    try:
        await until(lambda: bool(reports), limit=60, what="the first report")
        assert "not yet" in reports[0][0].reason
        gate.touch()
        async with asyncio.timeout(60):
            await offering
        assert reports[-1] == ()
        assert offered.offers
    finally:
        offering.cancel()
        await servers.aclose()
