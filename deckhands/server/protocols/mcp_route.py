"""The route of the MCP server: one answer per request. There are no sessions, and so no `GET` and no `DELETE`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deckhands.server.dependencies import Reader
from deckhands.server.guard import replay_body
from deckhands.server.openapi.json_body import JsonBody
from deckhands.server.protocols.agent_tools import AgentTools

routes = APIRouter(tags=["mcp"])


class RpcRequest(JsonBody):
    """A request or a notification of JSON-RPC 2.0; a notification has no id."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}]})

    jsonrpc: Literal["2.0"]
    id: Annotated[int, Field(strict=True)] | str | None = None
    method: str = Field(min_length=1, max_length=200)
    params: dict[str, Any] | None = None


ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answer, as one event of a stream",
        "content": {
            "text/event-stream": {
                "example": 'event: message\ndata: {"jsonrpc":"2.0","id":1,"result":{"tools":[]}}\n\n'
            },
            "application/json": {"example": {"jsonrpc": "2.0", "id": 1, "result": {"tools": []}}},
        },
    },
    202: {"description": "a notification was taken"},
}


class _McpResponse(Response):
    """The MCP server's answer, as a response of the route."""

    def __init__(self, tools: AgentTools, body: bytes) -> None:
        super().__init__()
        self._tools, self._body = tools, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the MCP server answer."""
        await self._tools.manager.handle_request(scope, replay_body(self._body, receive), send)


@routes.post("/mcp", response_class=Response, responses=ANSWERS, summary="Agents as tools (MCP, streamable HTTP)")
async def call(_principal: Reader, request: Request, _message: RpcRequest) -> Response:
    """Answer a message of the Model Context Protocol. Each tool needs further scopes; see docs/serving.md."""
    tools: AgentTools = request.app.state.agent_tools
    return _McpResponse(tools, await request.body())
