"""Commands in the conversation's shell (OpenHands 10.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract import CmdOutputMetadata, CmdOutputObservation, CmdRunAction, EventSource, Observation
from tool_worker.tools.tool import HostRequest, Tool

DEFAULT_TIMEOUT_SECONDS = 120.0
FAILED_BEFORE = "[`{command}` was run before your first step and did not succeed:]\n"


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
