"""Attributes the death of a worker to the action that it was running, but not to one that it only waits for."""

from __future__ import annotations

from broker.contract import Observation
from tool_worker.worker.steps.action_run import ActionRun, RestOfAction, RestOfHostCall
from tool_worker.workspace import HostResult


async def take_turn(run: ActionRun, rest: RestOfAction) -> Observation:
    """Run an action that workers have died with only when it is its turn."""
    try:
        await run.attribution.act()
        return await rest(run)
    finally:
        run.attribution.end_turn()


async def rest_while_host_acts(run: ActionRun, rest: RestOfHostCall) -> HostResult:
    """Take the mark away while only the host acts."""
    await run.attribution.rest()
    result = await rest(run)
    await run.attribution.act()
    return result
