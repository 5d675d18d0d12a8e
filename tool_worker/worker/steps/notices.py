"""Adds notices for the model to the observation of an action.

Holds: proxy refusals come first, because most programs do not report why they were refused. A notice is added only to
an observation of the host, and only once.
"""

from __future__ import annotations

from broker.contract import Observation, OutcomeUnknownObservation, SurveyObservation, WorkspaceUse
from tool_worker.worker.node.quota import WorkspaceQuota
from tool_worker.worker.node.usage_bounds import UsageBounds
from tool_worker.worker.steps.action_run import ActionRun, RestOfAction
from tool_worker.workspace import Workspaces


class Notices:
    """Adds the notices of one worker.

    Attributes:
        refusals: Number of times that egress proxies refused a host to a workspace; each host counts once per action.
    """

    def __init__(self, workspaces: Workspaces, quota: WorkspaceQuota | None, held: UsageBounds | None) -> None:
        self.refusals = 0
        self._workspaces = workspaces
        self._quota = quota
        self._held = held

    async def add(self, run: ActionRun, rest: RestOfAction) -> Observation:
        """Add the notices to an observation with a result."""
        observation = await rest(run)
        if isinstance(observation, OutcomeUnknownObservation):
            return observation
        notices = []
        refused = run.result.value.get("refused")
        if isinstance(refused, list) and refused:
            self.refusals += len(refused)
            listed = "".join(f"\n- {text}" for text in refused)
            notices.append(f"[The proxy of this workspace refused:{listed}]")
        is_read = not isinstance(observation, SurveyObservation)  # the model reads no survey
        may_have_grown = is_read and observation.workspace_use is WorkspaceUse.CHANGED
        if self._quota is not None and may_have_grown:
            notices.append(await self._quota.make_notice(run.conversation_id))
        if self._held is not None:
            notices.append(self._held.take_notice(run.conversation_id))
        if may_have_grown:
            notices.append(self._workspaces.take_notice(run.conversation_id))
        lines = [observation.content, *filter(None, notices)]
        return observation if len(lines) == 1 else observation.model_copy(update={"content": "\n".join(lines)})
