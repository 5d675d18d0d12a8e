"""Appends an action's observation, and notes a change of the workspace for the next checkpoint.

Holds: an observation that cannot be appended is replaced by an error observation.
"""

from __future__ import annotations

import logging

from broker.contract import ErrorObservation, Observation, PartyStopped, codec
from broker.coordination import Figures
from broker.log import Appended, EventLog, record_gap
from broker.runtime import CorruptEntry, DeckhandsError, EventsLost, EventUnfit, failpoint
from broker.secrets import SecretsLocked
from tool_worker.tools import make_replacement
from tool_worker.worker.steps.action_run import ActionRun, RestOfAction
from tool_worker.workspace import Checkpointing

_log = logging.getLogger(__name__)


class Recorder:
    """Appends observations to the log.

    Args:
        checkpointing: Saves workspaces; None if they are not saved.
        figures: Counts the observations.
    """

    def __init__(self, log: EventLog, *, worker_id: str, checkpointing: Checkpointing | None, figures: Figures) -> None:
        self._log = log
        self._worker_id = worker_id
        self._checkpointing = checkpointing
        self._figures = figures

    async def record(self, run: ActionRun, rest: RestOfAction) -> Observation:
        """Append the observation of the inner steps.

        Idempotent: a second observation of an action is refused as a duplicate.
        """
        failpoint("tool.after_claim")
        observation = await rest(run)
        self._figures.add("actions", label=observation.kind)
        failpoint("tool.before_append")
        try:
            await self._append(self._log, run, observation)
        except EventUnfit as error:
            text = f"The action ran, but its result cannot be recorded: {error}"
            await self._append(self._log, run, make_replacement(observation, text, error))
        except SecretsLocked as error:
            text = f"The result of this action cannot be recorded, because nothing can be hidden in it: {error}"
            # This text contains no secrets.
            await self._append(EventLog(self._log.store), run, make_replacement(observation, text, error))
        failpoint("tool.after_append")
        if run.is_stopped and not run.is_recorded and not run.is_abandoned:
            await self._report_stop(run)
        if self._checkpointing is not None and run.delivery.workspace.path is None:
            await self._checkpointing.note_result(run.conversation_id, observation.workspace_use)
        return observation

    async def _report_stop(self, run: ActionRun) -> None:
        """Append that a stopped action, which the log has answered before, has ended. Once for each action."""
        cid, action_id, ordered = run.conversation_id, run.delivery.action_id, run.stop_ordered_ms
        try:
            seconds = None
            if ordered is not None:
                now = await self._log.store.now((await self._log.store.locate(cid)).shard)
                seconds = round(max(0.0, now.timestamp() - ordered / 1_000), 3)
            stopped = PartyStopped(party="tool", action_id=action_id, seconds=seconds)
            await self._log.append_stop(cid, stopped, capability=run.delivery.capability)
        except DeckhandsError as error:  # the conversation may be gone, and the action has ended anyway
            _log.warning("the end of stopped action %d of %s is not recorded: %s", action_id, cid, error)

    async def _append(self, log: EventLog, run: ActionRun, observation: Observation) -> None:
        delivery = run.delivery
        # An unreadable action has no checksum.
        is_unread = isinstance(observation, ErrorObservation) and observation.error_id == CorruptEntry.code
        checksum = "" if is_unread else codec.checksum_of(delivery.entry)
        try:
            outcome = await log.append_observation(
                delivery.conversation_id,
                observation,
                worker_id=self._worker_id,
                place=delivery.location,
                checksum=checksum,
                fingerprint=run.fingerprint if hasattr(run, "action") else "",
            )
            run.is_recorded = isinstance(outcome, Appended)
        except EventsLost as lost:
            _log.warning("an action is no longer in its log: %s", lost.message)
            await record_gap(self._log, lost, noticed_by="the tool worker that carried it out")
