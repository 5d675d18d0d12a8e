"""Commands in the conversation's shell (OpenHands 10.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract.actions import CmdRunAction
from broker.contract.events import Observation
from broker.contract.observations import CmdOutputMetadata, CmdOutputObservation
from tool_worker.tools.tool import HostRequest, Tool

DEFAULT_TIMEOUT_SECONDS = 120.0


class RunCommand(Tool):
    """Run a command, or type into the one that is running."""

    action = CmdRunAction

    def request(self, action: CmdRunAction) -> HostRequest:
        """See `Tool.request`."""
        return HostRequest(
            "bash",
            {
                "command": action.command.strip(),
                "is_input": action.is_input,
                "timeout": action.timeout or DEFAULT_TIMEOUT_SECONDS,
                "blocking": action.blocking,
                "cwd": action.cwd,
                "is_static": action.is_static,
                # Hosts that were started before there were terminals know none of these.
                **({"terminal": action.terminal} if action.terminal else {}),
                **({"is_background": True} if action.is_background else {}),
                **({"control": action.control} if action.control else {}),
            },
        )

    def observe(self, action: CmdRunAction, result: Mapping[str, Any]) -> Observation:
        """See `Tool.observe`."""
        return CmdOutputObservation(
            content=result["content"],
            command=action.command,
            metadata=CmdOutputMetadata.model_validate(result["metadata"]),
            hidden=action.hidden,
        )
