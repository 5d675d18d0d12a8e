"""Queries about the workspace's code, answered by a program beside its shell (OpenHands 9.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract import CodeSearchAction, CodeSearchObservation, ErrorObservation, Observation
from tool_worker.tools.bash import DEFAULT_TIMEOUT_SECONDS
from tool_worker.tools.tool import HostRequest, Tool


class SearchCode(Tool):
    """Query the code."""

    action = CodeSearchAction

    def request(self, action: CodeSearchAction) -> HostRequest:
        """See `Tool.request`."""
        arguments = {"question": action.question, "arguments": action.arguments}
        return HostRequest("code", {**arguments, "timeout": action.timeout or DEFAULT_TIMEOUT_SECONDS})

    def observe(self, action: CodeSearchAction, result: Mapping[str, Any]) -> Observation:
        """See `Tool.observe`."""
        if result.get("is_error"):
            return ErrorObservation(content=result["content"])
        return CodeSearchObservation(content=result["content"], question=action.question)
