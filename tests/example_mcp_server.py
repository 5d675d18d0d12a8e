"""An MCP server by the official SDK: `python tests/example_mcp_server.py`, or with a port and a transport for HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
import urllib.request
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Image
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

server = MCPServer("example")
DESCRIPTION = os.environ.get("EXAMPLE_DESCRIPTION", "Say something again.")
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63606060000000040001f61738550000"
    "000049454e44ae426082"
)


@server.tool(description=DESCRIPTION, annotations=ToolAnnotations(read_only_hint=True))
def echo(text: str) -> str:
    return text


@server.tool(description="Tell something else of `echo` from now on.")
async def retell(description: str, context: Context) -> str:
    server.remove_tool("echo")
    server.add_tool(echo, description=description)
    await context.session.send_tool_list_changed()  # hears who has a session
    await context.notify_tools_changed()  # hears who has subscribed
    return "told"


@server.tool(description="Show a picture.")
def picture() -> Image:
    return Image(data=PIXEL, format="png")


@server.resource("notes://today", mime_type="text/plain")
def notes() -> str:
    return "buy milk"


@server.resource("pictures://pixel", mime_type="image/png")
def pixel() -> bytes:
    return PIXEL


@server.prompt(description="Greet someone.")
def greeting(name: str) -> str:
    return f"Say hello to {name}."


@server.tool(description="Fail.")
def fail() -> str:
    raise ToolError("the server's own error")


@server.tool(description="Tell what the server sees.")
def look(path: str) -> list[str]:
    return sorted(os.listdir(path))  # noqa: PTH208


@server.tool(description="Fetch a page.")
def fetch(address: str) -> str:
    try:
        return urllib.request.urlopen(address, timeout=20).read().decode()
    except OSError as error:
        return str(error)


@server.tool(description="Tell a variable of the server.")
def variable(name: str) -> str:
    return os.environ.get(name, "not there")


@server.tool(description="Tell a header of the call.")
def header(name: str, context: Context) -> str:
    request = context.request_context.request
    return request.headers.get(name, "not there") if request is not None else "no request"


@server.tool(description="Tell the key of the call.", annotations=ToolAnnotations(idempotent_hint=True))
def key(context: Context) -> str:
    meta = context.request_context.meta or {}
    return str(meta.get("deckhands/idempotencyKey", "not there"))


@server.tool(description="Count a call, and answer when the gate is opened.")
def count(trace: str, gate: str = "") -> str:
    with Path(trace).open("a") as file:
        file.write("counted\n")
    return Path(gate).read_text() if gate else "at once"


@server.tool(description="Run until stopped.")
async def linger(trace: str) -> str:
    note(trace, "begun")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        note(trace, "stopped")
        raise
    return "never"


def note(trace: str, line: str) -> None:
    with Path(trace).open("a") as file:
        file.write(f"{line}\n")


@server.tool(description="End.")
def end() -> str:
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(sys.argv[2], port=int(sys.argv[1]))
    else:
        server.run("stdio")
