"""The file that names MCP servers: what it may say, and that its secrets stay where they belong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker.runtime.errors import UsageError
from tool_worker.settings import load_tool_settings
from tool_worker.tools.mcp.config import McpServerSpec, read_servers


def written(folder: Path, servers: Any) -> Path:
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


def test_an_entry_becomes_a_server(tmp_path: Path) -> None:
    entries = {
        "issues": {"url": "https://mcp.test/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}, "timeout": 5},
        "time": {"command": "mcp-server-time", "args": ["--local"], "env": {"A": "${B}-${B}"}, "tools": ["get_*"]},
    }
    assert read_servers(written(tmp_path, entries), {"TOKEN": "t", "B": "b"}) == (
        McpServerSpec(
            name="issues",
            url="https://mcp.test/mcp",
            headers={"Authorization": "Bearer t"},
            timeout=5,
            secrets=("t", "Bearer t", "t"),
        ),
        McpServerSpec(
            name="time",
            command="mcp-server-time",
            args=("--local",),
            env={"A": "b-b"},
            tools=("get_*",),
            timeout=60,
            secrets=("b", "b"),
        ),
    )


def test_what_is_secret_of_an_entry_is_known(tmp_path: Path) -> None:
    entry = {"command": "x", "env": {"KEY": "${KEY}", "MODE": "fast"}, "args": ["literal"], "secrets": ["literal"]}
    (server,) = read_servers(written(tmp_path, {"a": entry}), {"KEY": "of-the-environment"})
    assert server.secrets == ("of-the-environment", "literal")


def test_the_settings_read_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, {"a": {"command": "x", "env": {"K": "${KEY}"}}})
    settings = load_tool_settings({"DECKHANDS_MCP": str(path), "KEY": "k"})
    assert [server.env for server in settings.mcp_servers] == [{"K": "k"}]


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({}, "give either a command or a url"),
        ({"command": "x", "url": "http://a"}, "give either a command or a url"),
        ({"command": "x y"}, "command: String should match pattern"),
        ({"url": "file:///etc/passwd"}, "url: String should match pattern"),
        ({"url": "http://a", "timeout": 0}, "timeout: Input should be greater than or equal to 1"),
        ({"url": "http://a", "timeout": 4000}, "timeout: Input should be less than or equal to 3600"),
        ({"url": "http://a", "timout": 5}, "timout: Extra inputs are not permitted"),
        ([], "it is not an object"),
    ],
)
def test_an_entry_that_cannot_be_used_is_refused(tmp_path: Path, entry: Any, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_servers(written(tmp_path, {"a": entry}), {})
    assert why in str(refused.value)


def test_a_missing_variable_is_named_and_a_secret_never_shown(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs the variable TOKEN, which is not set"):
        read_servers(written(tmp_path, {"a": {"url": "http://a/${TOKEN}"}}), {})
    with pytest.raises(UsageError) as refused:
        read_servers(written(tmp_path, {"a": {"url": "ftp://${TOKEN}"}}), {"TOKEN": "hunter2"})
    assert "hunter2" not in repr(refused.value)
    assert refused.value.__cause__ is None


def test_two_servers_at_one_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="have the same url"):
        read_servers(written(tmp_path, {"a": {"url": "http://x"}, "b": {"url": "http://x"}}), {})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"mcpServers": []}', "{"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="not a list of MCP servers"):
        read_servers(path, {})
    with pytest.raises(UsageError, match="not a list of MCP servers"):
        read_servers(tmp_path / "missing.json", {})
