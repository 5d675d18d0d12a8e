"""Cells in the conversation's IPython kernel (OpenHands 10.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract import ErrorObservation, IPythonRunCellAction, IPythonRunCellObservation, Observation
from tool_worker.tools.bash import DEFAULT_TIMEOUT_SECONDS
from tool_worker.tools.tool import HostRequest, Tool


class RunCell(Tool):
    """Run a cell."""

    action = IPythonRunCellAction

    def request(self, action: IPythonRunCellAction) -> HostRequest:
        """See `Tool.request`."""
        return HostRequest(
            "ipython",
            {
                "code": action.code,
                "include_extra": action.include_extra,
                "kernel_init_code": action.kernel_init_code,
                "timeout": action.timeout or DEFAULT_TIMEOUT_SECONDS,
            },
        )

    def observe(self, action: IPythonRunCellAction, result: Mapping[str, Any]) -> Observation:
        """See `Tool.observe`."""
        if result.get("is_error"):
            return ErrorObservation(content=result["content"], error_id="session_ended")
        images = tuple(image for image in result.get("image_urls") or () if isinstance(image, str))
        return IPythonRunCellObservation(content=result["content"], code=action.code, image_urls=images or None)
