"""Commands of agents in the conversation's shell (OpenHands 10.3), and commands of users in separate shells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract import (
    MAX_COMMAND_OUTPUT_CHARS,
    MAX_TIMEOUT_SECONDS,
    CmdOutputMetadata,
    CmdOutputObservation,
    CmdRunAction,
    CommandExecutedObservation,
    EventSource,
    ExecuteCommandAction,
    Observation,
    truncate_content,
)
from tool_worker.tools.tool import HostRequest, Tool

DEFAULT_TIMEOUT_SECONDS = 120.0
FAILED_BEFORE = "[`{command}` was run before your first step and did not succeed:]\n"
KILLED = "\n[It was killed after {seconds:g} seconds.]"


class RunCommand(Tool):
    """Run a command, or send input to the running one."""

    action = CmdRunAction

    def request(self, action: CmdRunAction) -> HostRequest:
        """See `Tool.request`."""
        return HostRequest(
            "bash",
            {
                "command": action.command if action.is_input else action.command.strip(),
                "is_input": action.is_input,
                "timeout": action.timeout or DEFAULT_TIMEOUT_SECONDS,
                "blocking": action.blocking,
                "cwd": action.cwd,
                "is_static": action.is_static,
                # Hosts of earlier versions, without terminals, know none of these.
                **({"terminal": action.terminal} if action.terminal else {}),
                **({"is_background": True} if action.is_background else {}),
                **({"control": action.control} if action.control else {}),
            },
        )

    def observe(self, action: CmdRunAction, result: Mapping[str, Any]) -> Observation:
        """See `Tool.observe`."""
        metadata = CmdOutputMetadata.model_validate(result["metadata"])
        content = result["content"]
        has_failed = action.hidden and metadata.exit_code != 0
        if has_failed and action.source is EventSource.ENVIRONMENT:
            content = FAILED_BEFORE.format(command=action.command) + content
        return CmdOutputObservation(
            content=content,
            command=action.command,
            metadata=metadata,
            hidden=action.hidden and not has_failed,
        )


class ExecuteCommand(Tool):
    """Run a user's command beside the agent, in a separate shell that ends with the command."""

    action = ExecuteCommandAction

    def request(self, action: ExecuteCommandAction) -> HostRequest:
        """See `Tool.request`."""
        return HostRequest(
            "bash",
            {
                "command": action.command.strip(),
                "is_input": False,
                "timeout": _limit_timeout(action),
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
            content += KILLED.format(seconds=_limit_timeout(action))
        return CommandExecutedObservation(content=content, exit_code=exit_code)


def _limit_timeout(action: ExecuteCommandAction) -> float:
    return min(max(action.timeout, 0.1), MAX_TIMEOUT_SECONDS)
