"""An MCP server over HTTP whose effects a ledger counts: `python -m tests.ledger_mcp_server PORT`."""

from __future__ import annotations

import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.types import ToolAnnotations

from tests.effects_ledger import report

PORT = int(os.environ.get("EFFECTS_PORT", "0"))
server = MCPServer("ledger")


def send(context: Context, name: str, mode: str) -> str:
    """Report under the key of the call, which the header repeats."""
    key = str((context.request_context.meta or {})["deckhands/idempotencyKey"])
    request = context.request_context.request
    assert request is not None
    assert request.headers["idempotency-key"] == key
    return report(PORT, key, name, mode)


@server.tool(description="Report under the key.", annotations=ToolAnnotations(idempotent_hint=True))
def mcp_keyed(context: Context) -> str:
    return send(context, "mcp_keyed", "once")


@server.tool(description="Report without regard to the key.")
def mcp_plain(context: Context) -> str:
    return send(context, "mcp_plain", "each")


if __name__ == "__main__":
    server.run("streamable-http", port=int(sys.argv[1]))
