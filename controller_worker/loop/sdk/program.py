"""The small program that runs the Claude Agent SDK: `python -I -m controller_worker.loop.sdk.program DESCRIPTOR`.

It talks to its controller worker over one socket, one JSON object per line. It reads the tools to offer (`begin`), a
user's message (`query`), replies of the log (`reply`) and results of calls (`result`). It reports that the SDK requests
a reply (`asks`), calls a tool (`calls`), has ended its turn (`ended`) or cannot continue (`failed`).

Holds: it has no key, no address of a provider and no tool with an effect. A call of the SDK waits for its result from
the log, found by the id of the call and not by its arguments. Its home is empty at the start and removed at the end.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from controller_worker.loop.sdk.endpoint import PREFIX, SERVER, Endpoint

MAX_LINE_BYTES = 64 * 2**20
TOOL_USE = "claudecode/toolUseId"
"""The field in which a tool call names its call in the reply."""
STDERR_LINES = 20
FOLDER = "deckhands-sdk-"
FOR_EVER_MS = str(2**31 - 1)

ENVIRONMENT = {
    "API_TIMEOUT_MS": FOR_EVER_MS,
    "MCP_TOOL_TIMEOUT": FOR_EVER_MS,
    "MAX_MCP_OUTPUT_TOKENS": "1000000",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
    "DISABLE_AUTO_COMPACT": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "ENABLE_TOOL_SEARCH": "false",
}


class SdkProgram:
    """The SDK and its two connections."""

    def __init__(self, writer: asyncio.StreamWriter, begun: Mapping[str, Any], home: str) -> None:
        self._writer = writer
        self._begun = begun
        self._home = home
        self._endpoint = Endpoint(begun["token"], lambda number: self.send(asks=number))
        self._results: dict[str, asyncio.Future[Mapping[str, Any]]] = {}
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)

    def send(self, **line: Any) -> None:
        """Send a message to the controller worker."""
        self._writer.write(json.dumps(line).encode() + b"\n")

    async def run(self, lines: AsyncIterator[Mapping[str, Any]]) -> None:
        """Work until the controller worker hangs up."""
        from claude_agent_sdk import ClaudeSDKClient

        try:
            async with ClaudeSDKClient(self._options(await self._endpoint.start())) as client:
                listening = asyncio.create_task(self._listen(client))
                async for line in lines:
                    if listening.done():
                        break
                    await self._handle_line(client, line)
                listening.cancel()
                with suppress(asyncio.CancelledError):
                    await listening
        except Exception as error:  # noqa: BLE001  (the outer edge: the controller worker decides what it means)
            self._fail(error)

    async def _handle_line(self, client: Any, line: Mapping[str, Any]) -> None:
        if "query" in line:
            self._endpoint.start_turn()
            await client.query(line["query"])
        elif "reply" in line:
            self._endpoint.provide_reply(line["reply"])
        elif "result" in line:
            waiting = self._find_result(line["result"]["id"])
            if not waiting.done():
                waiting.set_result(line["result"])

    def _find_result(self, call_id: str) -> asyncio.Future[Mapping[str, Any]]:
        return self._results.setdefault(call_id, asyncio.get_running_loop().create_future())

    async def _listen(self, client: Any) -> None:
        """Report the ends of turns."""
        from claude_agent_sdk import ResultMessage

        try:
            async for message in client.receive_messages():
                if isinstance(message, ResultMessage):
                    self.send(ended=message.subtype, is_error=message.is_error, text=str(message.result or "")[:2000])
            self.send(failed={"error": "CLIConnectionError", "text": "The CLI has ended.", "stderr": self._said})
        except Exception as error:  # noqa: BLE001  (as above)
            self._fail(error)

    @property
    def _said(self) -> str:
        return "\n".join(self._stderr)[-2000:]

    def _fail(self, error: BaseException) -> None:
        self.send(failed={"error": type(error).__name__, "text": str(error)[:2000], "stderr": self._said})

    def _options(self, address: str) -> Any:
        from claude_agent_sdk import ClaudeAgentOptions, McpSdkServerConfig

        names = [PREFIX + tool["name"] for tool in self._begun["tools"]]
        environment = {**ENVIRONMENT, "HOME": self._home, "TMPDIR": self._home}
        environment |= {"ANTHROPIC_BASE_URL": address, "ANTHROPIC_API_KEY": self._begun["token"]}
        return ClaudeAgentOptions(
            tools=[],
            setting_sources=[],
            strict_mcp_config=True,
            mcp_servers={SERVER: McpSdkServerConfig(type="sdk", name=SERVER, instance=self._server())},
            allowed_tools=names,
            model=self._begun["model"],
            system_prompt="",
            verbatim_prompts=True,  # otherwise words with a leading @ would name files to read
            cwd=self._home,
            env=environment,
            max_buffer_size=MAX_LINE_BYTES,
            stderr=self._stderr.append,
        )

    def _server(self) -> Any:
        """Return the MCP server with the agent's tools."""
        from mcp.server import Server
        from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool

        tools = [
            Tool(name=tool["name"], description=tool["description"], input_schema=tool["parameters"])
            for tool in self._begun["tools"]
        ]

        async def list_tools(_context: Any, _params: Any) -> ListToolsResult:
            return ListToolsResult(tools=tools)

        async def call_tool(context: Any, params: Any) -> CallToolResult:
            call_id = _find_tool_use_id(context, params)
            if call_id is None:
                text = "This call names no reply, so nothing was done."
                is_error = True
            else:
                self.send(calls=call_id, name=params.name)
                result = await asyncio.shield(self._find_result(call_id))
                text = result["text"]
                is_error = result["is_error"]
            return CallToolResult(content=[TextContent(type="text", text=text)], is_error=is_error)

        return Server(SERVER, version="1", on_list_tools=list_tools, on_call_tool=call_tool)


def _find_tool_use_id(context: Any, params: Any) -> str | None:
    """Return the id of the call in the reply that a tool call belongs to."""
    for meta in (getattr(params, "meta", None), getattr(context, "meta", None)):
        if meta is None:
            continue
        found = meta.get(TOOL_USE) if isinstance(meta, Mapping) else (meta.model_extra or {}).get(TOOL_USE)
        if isinstance(found, str):
            return found
    return None


async def _read_lines(reader: asyncio.StreamReader) -> AsyncIterator[Mapping[str, Any]]:
    while line := await reader.readline():
        yield json.loads(line)


async def _main(descriptor: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=MAX_LINE_BYTES)
    home = tempfile.mkdtemp(prefix=FOLDER)
    try:
        lines = _read_lines(reader)
        begun = await anext(lines)
        work = asyncio.ensure_future(SdkProgram(writer, begun["begin"], home).run(lines))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
        with suppress(asyncio.CancelledError):
            await work
        with suppress(OSError):
            await writer.drain()
    finally:
        shutil.rmtree(home, ignore_errors=True)
        around = Path(home).parent
        if around.name.startswith(FOLDER):  # the program removes its home itself, because a killed worker cannot
            shutil.rmtree(around, ignore_errors=True)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
