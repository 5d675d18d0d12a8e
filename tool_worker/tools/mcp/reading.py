"""Tools that read an MCP server's resources and prompts, for servers whose entry asks for them.

Holds: an answer of a server is text for the model, within the limits of every answer; bytes that are no image are left
out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from broker.contract import MCPObservation, OutcomePolicy, ToolOffer
from broker.tools import CustomTool, ToolContext, ToolFailed
from tool_worker.tools.mcp.connection import CONNECT_LIMIT_SECONDS
from tool_worker.tools.mcp.server import McpServer
from tool_worker.tools.offered import choose_images

if TYPE_CHECKING:
    from mcp.types import PaginatedRequestParams, Request, Result

    MakeRequest = Callable[[dict[str, Any]], tuple[Request[Any, Any], type[Result]]]

TEXT = {"type": "string"}
CURSOR = {"type": "object", "properties": {"cursor": {**TEXT, "description": "nextCursor of the page before"}}}


def make_reading_tools(server: McpServer) -> list[CustomTool]:
    """Return the tools that read a server's resources and prompts, as far as its entry enables them."""
    spec = server.spec
    found = []
    if spec.resources:
        uri = {"type": "object", "properties": {"uri": TEXT}, "required": ["uri"]}
        found += [
            _make_tool(server, "list_resources", "List the resources of this server.", CURSOR, _list_resources),
            _make_tool(server, "read_resource", "Read a resource of this server.", uri, _read_resource),
        ]
    if spec.prompts:
        texts = {"type": "object", "additionalProperties": TEXT}
        named = {"type": "object", "properties": {"name": TEXT, "arguments": texts}, "required": ["name"]}
        found += [
            _make_tool(server, "list_prompts", "List the prompts of this server.", CURSOR, _list_prompts),
            _make_tool(server, "get_prompt", "Get a prompt of this server, filled in.", named, _get_prompt),
        ]
    return found


def _make_tool(
    server: McpServer, name: str, description: str, parameters: dict[str, Any], make_request: MakeRequest
) -> CustomTool:
    spec = server.spec
    offer = ToolOffer(
        key=f"{spec.name}/{name}",
        name=name,
        description=description,
        parameters=parameters,
        runner="mcp",
        pool=spec.pool,
        outcome=OutcomePolicy.IDEMPOTENT,
    )

    async def run(arguments: dict[str, Any], context: ToolContext) -> MCPObservation:  # noqa: ARG001
        from mcp import MCPError

        try:
            request, result_type = make_request(arguments)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ToolFailed(f"Invalid argument {where!r} in tool call {name}: {first['msg']}.") from error
        try:
            result = await server.request(request, result_type)
        except MCPError as error:
            failed = json.dumps({"isError": True, "error": str(error), "content": []})
            return MCPObservation(content=failed, name=name, arguments=arguments)
        plain = result.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"result_type", "meta"})
        images = choose_images(_take_images(plain))
        return MCPObservation(
            content=json.dumps(plain, ensure_ascii=False), name=name, arguments=arguments, image_urls=images or None
        )

    return CustomTool(offer, None, run, timeout_seconds=spec.timeout + CONNECT_LIMIT_SECONDS)


def _take_images(plain: dict[str, Any]) -> list[str]:
    """Remove the bytes from the contents of a resource, and return the images among them."""
    images = []
    for part in plain.get("contents", []):
        content = part.pop("blob", None)
        if content is None:
            continue
        kind = str(part.get("mimeType", ""))
        if kind.startswith("image/"):
            images.append(f"data:{kind};base64,{content}")
        part["blob"] = f"[{len(content) * 3 // 4} bytes]"
    return images


def _make_page(arguments: dict[str, Any]) -> PaginatedRequestParams:
    """Return only the cursor, because the model must not set other fields of the request, such as `_meta`."""
    from mcp.types import PaginatedRequestParams

    return PaginatedRequestParams.model_validate({"cursor": arguments.get("cursor")})


def _list_resources(arguments: dict[str, Any]) -> tuple[Request[Any, Any], type[Result]]:
    from mcp.types import ListResourcesRequest, ListResourcesResult

    return ListResourcesRequest(params=_make_page(arguments)), ListResourcesResult


def _read_resource(arguments: dict[str, Any]) -> tuple[Request[Any, Any], type[Result]]:
    from mcp.types import ReadResourceRequest, ReadResourceRequestParams, ReadResourceResult

    params = ReadResourceRequestParams.model_validate({"uri": arguments.get("uri")})
    return ReadResourceRequest(params=params), ReadResourceResult


def _list_prompts(arguments: dict[str, Any]) -> tuple[Request[Any, Any], type[Result]]:
    from mcp.types import ListPromptsRequest, ListPromptsResult

    return ListPromptsRequest(params=_make_page(arguments)), ListPromptsResult


def _get_prompt(arguments: dict[str, Any]) -> tuple[Request[Any, Any], type[Result]]:
    from mcp.types import GetPromptRequest, GetPromptRequestParams, GetPromptResult

    given = {name: arguments[name] for name in ("name", "arguments") if name in arguments}
    return GetPromptRequest(params=GetPromptRequestParams.model_validate(given)), GetPromptResult
