"""Passes the secrets that a command names to its environment."""

from __future__ import annotations

from dataclasses import replace

from broker.contract import Observation
from broker.log import EventLog
from tool_worker.worker.steps.action_run import ActionRun, RestOfAction


async def pass_secrets(log: EventLog, run: ActionRun, rest: RestOfAction) -> Observation:
    """Add the secrets that a command names to its request, and no others."""
    request = run.request
    is_command = request.tool == "acp" or (request.tool == "bash" and not request.arguments["is_input"])
    if log.secrets is not None and is_command:
        command = request.arguments["command"]
        wanted = await log.secrets.wanted_by(run.conversation_id, command, claimed=run.claim.secrets)
        if wanted:
            run.request = replace(request, arguments={**request.arguments, "env": wanted})
    return await rest(run)
