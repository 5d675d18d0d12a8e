"""Commands that a user runs beside the agent, each in a separate shell that ends with the command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract import (
    MAX_COMMAND_OUTPUT_CHARS,
    MAX_TIMEOUT_SECONDS,
    CmdOutputMetadata,
    CommandExecutedObservation,
    ExecuteCommandAction,
    Observation,
    truncate_content,
)
from tool_worker.tools.tool import HostRequest, Tool

KILLED = "\n[It was killed after {seconds:g} seconds.]"


class ExecuteCommand(Tool):
    """Run a user's command."""

    action = ExecuteCommandAction

    def request(self, action: ExecuteCommandAction) -> HostRequest:
        """See `Tool.request`."""
        return HostRequest(
            "bash",
            {
                "command": action.command.strip(),
                "is_input": False,
                "timeout": _limit(action),
                "blocking": True,
                "cwd": None,
                "is_static": True,
            },
        )

    def observe(self, action: ExecuteCommandAction, result: Mapping[str, Any]) -> Observation:
        """See `Tool.observe`."""
        exit_code = CmdOutputMetadata.model_validate(result["metadata"]).exit_code
        content = truncate_content(result["content"], MAX_COMMAND_OUTPUT_CHARS)
        if result["state"] == "hard_timeout":
            content += KILLED.format(seconds=_limit(action))
        return CommandExecutedObservation(content=content, exit_code=exit_code)


def _limit(action: ExecuteCommandAction) -> float:
    return min(max(action.timeout, 0.1), MAX_TIMEOUT_SECONDS)
