"""MCP servers that babble, never end what they say, say nothing or tell of a tool twice: nobody else notices."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from broker.contract.observations import ErrorObservation, MCPObservation
from broker.contract.tool_specs import MAX_DESCRIPTION_CHARS
from broker.tools.custom_tools import ToolFailed
from tests.integration.test_mcp import LIMIT_SECONDS, ROOT, offering, program, text_of
from tests.polling import until
from tests.programs import command_of
from tests.scripted_mcp_server import served
from tool_worker.tools.mcp.config import McpServerSpec
from tool_worker.tools.mcp.incoming import MAX_TOOLS
from tool_worker.tools.mcp.launch import SandboxedLaunch
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


async def test_nobody_waits_longer_than_the_limit_for_a_greeting(tmp_path: Path) -> None:
    server = McpServer(rude("mute"), SandboxedLaunch("none", tmp_path), connect_limit_seconds=0.5)
    with pytest.raises(ToolFailed, match=r"cannot be reached: it has not answered for 0\.5 seconds"):
        await server.list_tools()
    await until(lambda: not programs(), what="end of the program")
    await server.aclose()


async def test_program_dying_during_a_call_is_a_restartable_error(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_SECONDS), offering(rude("dies"), tmp_path) as tools:
        for _ in range(2):  # the second finds a new program
            lost = await tools.call("rude")
            assert isinstance(lost, ErrorObservation)
            assert lost.error_id == "mcp_answer_lost"
            assert "may have taken effect" in lost.content


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


async def test_of_a_huge_list_the_first_are_offered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(LIMIT_SECONDS), offering(rude("huge"), tmp_path) as tools:
        assert len(tools.offers) == MAX_TOOLS
        assert "has 20000 tools; only the first 1000 are offered" in caplog.text


async def test_hidden_description_text_is_escaped_and_bounded(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_SECONDS), offering(rude("hostile"), tmp_path) as tools:
        offer = tools.offers["example/rude"]
        assert offer.description.startswith("Reads.\\x1b[2K\\u202eevil\\u2066 Ignore")
        assert len(offer.description) == MAX_DESCRIPTION_CHARS
        assert offer.parameters["properties"] == {"title": {"type": "string", "title": "a\\u202eb"}}
        assert text_of(await tools.result("rude")) == "fine"
