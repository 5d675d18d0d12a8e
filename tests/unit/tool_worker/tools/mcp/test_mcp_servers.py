"""MCP servers: valid files, protection of their secrets, and valid answers by HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from broker.runtime.errors import UsageError
from broker.tools.mcp_config import McpServerSpec, read_servers
from tool_worker.settings import load_tool_settings
from tool_worker.tools.mcp.http_connection import (
    EVENT_ENDS,
    LATE_SECONDS,
    SILENCE_SECONDS,
    AnnouncementListener,
    StreamableClient,
    make_limited_client,
)
from tool_worker.tools.mcp.program import MESSAGE_LIMIT_BYTES


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


def test_secrets_of_an_entry_are_known(tmp_path: Path) -> None:
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


class Pieces(httpx2.AsyncByteStream):
    def __init__(self, event: bytes, end: bytes, count: int) -> None:
        self._pieces = [event, *(bytes([byte]) for byte in end)]
        self._count = count

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self._count):
            for piece in self._pieces:
                yield piece


async def received_bytes(answer: Pieces) -> int:
    headers = {"Content-Type": "text/event-stream"}
    async with make_limited_client() as client:
        client._transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, stream=answer))
        async with client.stream("GET", "http://server.example/sse") as response:
            return sum([len(chunk) async for chunk in response.aiter_raw()])


@pytest.mark.parametrize("end", EVENT_ENDS)
async def test_many_events_may_be_longer_than_one_may_be(end: bytes) -> None:
    event = b"data: " + b"x" * 2**20
    assert await received_bytes(Pieces(event, end, 20)) == 20 * len(event + end) > MESSAGE_LIMIT_BYTES


async def test_one_event_may_not() -> None:
    with pytest.raises(httpx2.SSEError, match="more than"):
        await received_bytes(Pieces(b"data: " + b"x" * 2**20, b"\n", 20))


@pytest.mark.parametrize(("method", "limit"), [("GET", SILENCE_SECONDS), ("POST", 1.0 + LATE_SECONDS)])
async def test_call_limit_does_not_end_the_announcement_stream(method: str, limit: float) -> None:
    seen: list[float] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.extensions["timeout"]["read"])
        return httpx2.Response(200, json={})

    async with StreamableClient({}, 1.0, AnnouncementListener(lambda: None)) as client:
        client._transport = httpx2.MockTransport(answer)
        await client.request(method, "http://server.example/mcp", json={})
    assert seen == [limit]
