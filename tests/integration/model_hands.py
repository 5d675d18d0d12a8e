"""A model's hands in a workspace: a tool call as the model writes it, run by a real host."""

from __future__ import annotations

import itertools
from typing import Any

from broker.contract.events import AgentSpec, Observation
from controller_worker.agents.codeact import CodeActAgent
from tool_worker.tools.registry import find_tool
from tool_worker.tools.tool import HostRequest
from tool_worker.workspace.open_workspace import OpenWorkspace


class ModelHands:
    """Calls the tools of CodeActAgent in a workspace, under action ids 1, 2, 3, …"""

    def __init__(self, workspace: OpenWorkspace, **agent: Any) -> None:
        self.workspace = workspace
        self.tools = {tool.name: tool for tool in CodeActAgent(AgentSpec(**agent)).tools}
        self.ids = itertools.count(1)

    async def __call__(self, name: str, **arguments: Any) -> Observation:
        convert = self.tools[name].convert
        assert convert is not None
        action: Any = convert({**arguments, "security_risk": "LOW"})
        tool = find_tool(action.kind)
        request = tool.request(action)
        if not isinstance(request, HostRequest):
            return request
        result = await self.workspace.run(next(self.ids), request.tool, request.arguments)
        return tool.observe(action, result.value)

    async def bash(self, command: str, **arguments: Any) -> Any:
        return await self("execute_bash", command=command, **arguments)

    async def edit(self, command: str, path: object, **arguments: Any) -> str:
        return (await self("str_replace_editor", command=command, path=str(path), **arguments)).agent_text
