"""Turns of ACP agents: requests to the program beside the shell, and its reports (`tool_worker.host.acp`).

Holds: a report is untrusted, because the agent runs a model's instructions. Any content becomes an observation or, if
that is impossible, a failed report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from broker.contract import (
    AcpObservation,
    AcpPermissionAction,
    AcpTurnAction,
    ErrorObservation,
    Observation,
    replace_surrogates,
    to_plain_json,
)
from tool_worker.tools.tool import HostRequest, Tool

CALL_SECONDS = 120.0
"""Time limit for the program's own answer."""


class PromptAgent(Tool):
    """Prompt an agent, or let it continue."""

    action = AcpTurnAction

    def request(self, action: AcpTurnAction) -> HostRequest:
        """See `Tool.request`."""
        return _make_request(action, {"prompt": action.prompt})

    def observe(self, action: AcpTurnAction, result: Mapping[str, Any]) -> Observation:
        """See `Tool.observe`."""
        return _make_observation(action.session_id, result)


class PermitAgentCall(Tool):
    """Let an agent make a call."""

    action = AcpPermissionAction

    def request(self, action: AcpPermissionAction) -> HostRequest:
        """See `Tool.request`."""
        return _make_request(action, {})

    def observe(self, action: AcpPermissionAction, result: Mapping[str, Any]) -> Observation:
        """See `Tool.observe`."""
        return _make_observation(action.session_id, result)


def _make_request(action: AcpTurnAction | AcpPermissionAction, more: Mapping[str, Any]) -> HostRequest:
    arguments = {
        "command": action.command,
        "session_id": action.session_id,
        "permission": action.permission,
        "option_id": action.option_id,
        "silence_seconds": action.timeout,
        "timeout": CALL_SECONDS,
    }
    return HostRequest("acp", {**arguments, **more})


def _make_observation(session_id: str, result: Mapping[str, Any]) -> Observation:
    if result.get("is_error"):
        return ErrorObservation(content=str(result.get("content")), error_id="session_ended")
    try:
        return AcpObservation.model_validate(_to_plain(dict(result["report"])))
    except (ValidationError, ValueError, TypeError, KeyError) as error:
        reason = replace_surrogates(f"The report of the agent cannot be recorded: {type(error).__name__}.")
        return AcpObservation(state="failed", session_id=session_id, code="malformed_reply", reason=reason)


def _to_plain(value: Any) -> Any:
    """Return a value that the log can store; drops a call's arguments if they cannot be stored."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [_to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {
            str(name): _to_plain_arguments(item) if name == "arguments" else _to_plain(item)
            for name, item in value.items()
        }
    return value


def _to_plain_arguments(value: Any) -> dict[str, Any]:
    try:
        return dict(to_plain_json(value))
    except (ValueError, TypeError, RecursionError):
        return {}
