"""An MCP server by Streamable HTTP in the test's own process, with scripted answers and visible listeners."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import web

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"text": {"type": "string"}}}
Route = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def tool(name: str, description: str = "Answers.", **more: Any) -> dict[str, Any]:
    """Return a tool as a server tells of it."""
    return {"name": name, "description": description, "inputSchema": SCHEMA, **more}


class ScriptedServer:
    """A server with scripted answers.

    Attributes:
        tools: the listed ones.
        answer: the text of every answer to a call.
        images: base64 texts of pictures beside it.
        form: of answers to calls: `application/json` or `text/event-stream`.
        is_streaming: whether a client may listen for announcements.
        sessions: those that are open; a request with another gets the status 404.
        calls: the names of the tools that were called.
        listeners: the streams on which clients listen now; `listened`: how many there have been.
        before_call: a callback on each call; if it returns an answer, that is sent.
    """

    def __init__(self) -> None:
        self.tools = [tool("echo")]
        self.answer = "fine"
        self.images: list[str] = []
        self.form = "application/json"
        self.is_streaming = True
        self.sessions: set[str] = set()
        self.calls: list[str] = []
        self.listings = 0
        self.listeners: list[web.StreamResponse] = []
        self.listened = 0
        self.begun = 0
        self.before_call: Route | None = None
        self.url = ""

    async def announce(self) -> None:
        """Tell all who listen that there are other tools now."""
        said = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
        for listener in self.listeners:
            await listener.write(event(said))

    def hang_up(self) -> None:
        for listener in self.listeners:
            transport = listener._req.transport if listener._req else None
            if transport is not None:
                transport.abort()
        self.listeners.clear()

    async def route(self, request: web.BaseRequest) -> web.StreamResponse:
        session = request.headers.get("mcp-session-id")
        if session is not None and session not in self.sessions:
            refusal = {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": "Session not found"}}
            return web.json_response(refusal, status=404)
        if request.method == "GET":
            return await self._listen(request) if self.is_streaming else web.Response(status=405)
        if request.method != "POST":
            return web.Response(status=405)
        asked = await request.json()
        method = asked.get("method", "")
        if "id" not in asked:
            return web.Response(status=202)
        if method == "tools/call":
            self.calls.append(asked["params"]["name"])
            if self.before_call is not None:
                return await self.before_call(request)
        headers = {}
        if method == "initialize":
            self.begun += 1
            session = f"session-{self.begun}"
            self.sessions.add(session)
            headers["mcp-session-id"] = session
        said = {"jsonrpc": "2.0", "id": asked["id"], "result": self._result(method, asked.get("params") or {})}
        if method == "tools/call" and self.form == "text/event-stream":
            return web.Response(body=event(said), content_type=self.form)
        return web.json_response(said, headers=headers)

    def _result(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            capabilities = {"tools": {"listChanged": True}}
            about = {"name": "scripted", "version": "1"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": capabilities, "serverInfo": about}
        if method == "tools/list":
            self.listings += 1
            return {"tools": self.tools}
        if method == "tools/call":
            images = [{"type": "image", "data": data, "mimeType": "image/png"} for data in self.images]
            return {"content": [{"type": "text", "text": self.answer}, *images]}
        return {}

    async def _listen(self, request: web.BaseRequest) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(b": open\n\n")
        self.listeners.append(stream)
        self.listened += 1
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if stream in self.listeners:
            self.listeners.remove(stream)
        return stream


def event(said: dict[str, Any]) -> bytes:
    return b"event: message\ndata: " + json.dumps(said).encode() + b"\n\n"


@asynccontextmanager
async def served(route: Route) -> AsyncIterator[str]:
    """Yield the address at which requests are answered so."""
    runner = web.ServerRunner(web.Server(route, handler_cancellation=True), shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def scripted_server() -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer()
    async with served(server.route) as url:
        server.url = url
        yield server
