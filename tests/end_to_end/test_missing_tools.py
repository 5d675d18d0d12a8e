"""Tools that a tool worker cannot offer: the person who asks for one reads why, at once, by every way."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from deckhands import Client
from tests.integration.command_line import Done, cluster, deckhands, environment, finished, started
from tests.turns import finish, script

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
