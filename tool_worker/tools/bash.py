"""Commands in the conversation's shell (OpenHands 10.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract.actions import CmdRunAction
from broker.contract.events import EventSource, Observation
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation, ErrorObservation
from tool_worker.tools.shell_syntax import top_level_commands
from tool_worker.tools.tool import HostRequest, Tool

DEFAULT_TIMEOUT_SECONDS = 120.0
FAILED_BEFORE = "[`{command}` was run before your first step and did not succeed:]\n"


class RunCommand(Tool):
    """Run a command, or type into the one that is running."""

    action = CmdRunAction

    def request(self, action: CmdRunAction) -> HostRequest | Observation:
        """See `Tool.request`."""
        command = action.command if action.is_input else action.command.strip()
        if not action.is_input:
            commands = top_level_commands(command)
            if len(commands) > 1:
                listed = "\n".join(f"({n}) {text}" for n, text in enumerate(commands, 1))
                return ErrorObservation(
                    content="ERROR: Cannot execute multiple commands at once.\n"
                    f"Please run each command separately OR chain them into a single command via && or ;\n"
                    f"Provided commands:\n{listed}"
                )
        return HostRequest(
            "bash",
            {
                "command": command,
                "is_input": action.is_input,
                "timeout": action.timeout or DEFAULT_TIMEOUT_SECONDS,
                "blocking": action.blocking,
                "cwd": action.cwd,
                "is_static": action.is_static,
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
