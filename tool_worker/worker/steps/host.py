"""Sends an action with its key and its secrets to the workspace host, and turns the result into an observation.

Holds: an outcome that the host does not know is reported as unknown.
"""

from __future__ import annotations

from dataclasses import replace

from broker.contract import ErrorObservation, Observation, OutcomeUnknownObservation
from broker.log import EventLog
from broker.runtime import IDEMPOTENCY_KEY_VARIABLE, failpoint
from broker.secrets import SecretUnavailable
from tool_worker.host.protocol import RECORDED, RUNNING
from tool_worker.tools import HostRequest, find_tool
from tool_worker.worker.steps.action_run import ActionRun, RestOfAction, RestOfHostCall
from tool_worker.worker.steps.journal import NOT_RUN, log_reused_number
from tool_worker.workspace import HostResult

LOST_WITH_HOST = (
    "The process that ran this action ended before the result was recorded. "
    "The action may have taken effect, wholly or in part. Check before you repeat it."
)


async def make_request(run: ActionRun, rest: RestOfAction) -> Observation:
    """Find the action's tool and build the request to the host; answer here if the action cannot run."""
    tool = find_tool(run.action.kind)
    if tool is None:
        return ErrorObservation(content=f"This worker has no tool for {run.action.kind}.")
    request = tool.request(run.action)
    if not isinstance(request, HostRequest):
        return request
    run.tool = tool
    run.request = request
    return await rest(run)


async def observe(log: EventLog, ask_host: RestOfHostCall, run: ActionRun) -> Observation:
    """Call the host, and return the observation of its result."""
    run.result = await ask_host(run)
    failpoint("tool.after_result")
    if run.result.is_other:
        await log_reused_number(log, run.action, run.conversation_id)
        return OutcomeUnknownObservation(content=NOT_RUN)
    if run.result.is_unknown:
        return OutcomeUnknownObservation(content=LOST_WITH_HOST)
    return run.tool.observe(run.action, run.result.value)


async def run_on_host(run: ActionRun) -> HostResult:
    """Run the action on the host, or return its result from the host's journal."""
    return await run.host.run(
        run.action.id,
        run.request.tool,
        run.request.arguments,
        may_repeat=run.may_repeat,
        fingerprint=run.fingerprint,
    )


async def pass_variables(log: EventLog, run: ActionRun, rest: RestOfAction) -> Observation:
    """Add to a request the action's idempotency key, and only those secrets that a command names."""
    request, added = run.request, dict[str, object]()
    is_shell = request.tool == "bash" and not request.arguments["is_input"]
    variables = {IDEMPOTENCY_KEY_VARIABLE: run.idempotency_key} if is_shell else {}
    if log.secrets is not None and (is_shell or request.tool == "acp"):
        command = request.arguments["command"]
        try:
            variables |= await log.secrets.find_named(run.conversation_id, command, claimed=run.claim.secrets)
        except SecretUnavailable:
            status = await run.host.status(run.action.id, fingerprint=run.fingerprint)
            if status.state not in (RECORDED, RUNNING):
                raise
            # An earlier worker has started it with its secrets; only its result is collected.
    if variables:
        added["env"] = variables
    if request.tool == "ipython":
        added["variables"] = {IDEMPOTENCY_KEY_VARIABLE: run.idempotency_key}
    if added:
        run.request = replace(request, arguments={**request.arguments, **added})
    return await rest(run)
