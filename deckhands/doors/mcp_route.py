"""The route of the MCP server: one request, one answer; no sessions, so no `GET` and no `DELETE`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deckhands.doors.agent_tools import AgentTools
from deckhands.server.dependencies import Reader

routes = APIRouter(tags=["mcp"])


class _Answer(Response):
    """What the MCP server answers."""

    def __init__(self, tools: AgentTools) -> None:
        super().__init__()
        self._tools = tools

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it answer."""
        await self._tools.manager.handle_request(scope, receive, send)


@routes.post("/mcp", response_class=Response, summary="Agents as tools (MCP, streamable HTTP)")
async def call(_principal: Reader, request: Request) -> Response:
    """Answer a message of the Model Context Protocol. Each tool asks for further scopes; see docs/serving.md."""
    tools: AgentTools = request.app.state.agent_tools
    return _Answer(tools)
