"""Calls of tools that are not part of an agent but were offered to it: `AgentSpec.tools` and MCP servers."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field

from broker.contract.actions import RiskyAction
from broker.contract.events import JsonObject
from broker.contract.kinds import Paragraph


class OfferedToolAction(RiskyAction):
    """Call a tool that is not part of the agent but was offered to it: one of `AgentSpec.tools`.

    Attributes:
        name: the name in the model's call.
        tool: the key of the offer; empty if equal to the name.
        fingerprint: the fingerprint of the offer that the model saw.
        pool: the pool of the tool workers that run it; empty for those that hold the conversation's workspace.
    """

    name: str
    arguments: JsonObject = Field(default_factory=dict)
    tool: str = ""
    fingerprint: str = ""
    pool: str = ""

    @property
    def pool_wanted(self) -> str:
        """See `Event.pool_wanted`."""
        return self.pool

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return f"Calling {self.tool or self.name}"

    @property
    def asked(self) -> tuple[Paragraph, ...]:
        """See `Action.asked`."""
        return (Paragraph(f"{self.sentence} {json.dumps(self.arguments, indent=2)}", "cyan", "  "),)


class ToolCallAction(OfferedToolAction):
    """Call a function or class that a tool worker offers."""

    kind: Literal["action.call_tool"] = "action.call_tool"


class MCPAction(OfferedToolAction):
    """Call a tool of an MCP server."""

    kind: Literal["action.call_tool_mcp"] = "action.call_tool_mcp"
