"""Attributes a worker's death to the action running in it, but not to an action that only waits for its host."""

from __future__ import annotations

from broker.contract import Observation
from tool_worker.worker.steps.action_run import ActionRun, RestOfAction, RestOfHostCall
from tool_worker.workspace import HostResult


async def take_turn(run: ActionRun, rest: RestOfAction) -> Observation:
    """Run an action; if workers have died during it, wait for its turn to run alone."""
    try:
        await run.attribution.mark_acting()
        return await rest(run)
    finally:
        run.attribution.end_turn()


async def rest_while_host_acts(run: ActionRun, rest: RestOfHostCall) -> HostResult:
    """Acquit the action while only the host acts, so that a worker's death does not count against it."""
    await run.attribution.acquit()
    result = await rest(run)
    await run.attribution.mark_acting()
    return result
