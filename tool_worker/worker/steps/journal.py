"""Compares a workspace host's journal with the log, because the host may have run actions that the store has lost.

Holds: the comparison is made when a host is attached and after every reconnect to the store. If the host's newest
action is not in the log, the log records the gap, and no action decided before the gap starts in the workspace.
Does not: trust a host beyond its own journal; a false journal can only block the host's own conversation.
"""

from __future__ import annotations

from broker.contract import Action, Observation, OutcomeUnknownObservation
from broker.coordination import ActionReclaimed
from broker.log import EventLog, record_gap
from broker.runtime import CorruptEntry, DeckhandsError, EventsLost, StoreMisconfigured, failpoint
from tool_worker.host.protocol import NEVER_STARTED, OTHER, RECORDED, RUNNING
from tool_worker.worker.steps.action_run import ActionRun, RestOfAction, compute_fingerprint

NOT_RUN = (
    "This action was not run. It was decided before it was known that the store had lost events of this conversation: "
    "other actions have run in this workspace since, and their effects may be present. "
    "Check the current state, then decide again."
)


LOST_BY_REBOOT = (
    "The machine was restarted after this action was assigned, and the record of what ran may be incomplete. "
    "The action may have taken effect, wholly or in part. Check before you repeat it."
)


async def check_journal(log: EventLog, run: ActionRun, rest: RestOfAction) -> Observation:
    """Answer an action without starting it, if it is outdated or may have run before a reboot.

    Raises:
        HostLost: The host does not answer.
    """
    if await _is_outdated(log, run):
        return OutcomeUnknownObservation(content=NOT_RUN)
    failpoint("tool.before_run")
    if isinstance(run.claim, ActionReclaimed) and not run.may_repeat:
        status = await run.host.status(run.action.id)
        # A dead worker had claimed the action, and it is missing from a journal that a reboot may have truncated.
        if status.state == NEVER_STARTED and not status.is_certain:
            return OutcomeUnknownObservation(content=LOST_BY_REBOOT)
    return await rest(run)


async def _is_outdated(log: EventLog, run: ActionRun) -> bool:
    """Return whether the action was decided before a recorded gap and has not started."""
    host = run.host
    connects = log.store.connection.connects
    if host.connection.checked_at != connects:
        newest = await host.find_newest()
        if newest is not None:
            host.connection.gap_id = await _record_gap_if_lost(log, run, *newest)
        host.connection.checked_at = connects
    if run.action.id >= host.connection.gap_id:
        return False
    status = await host.status(run.action.id, fingerprint=run.fingerprint)
    return status.state not in (RECORDED, RUNNING)


async def log_reused_number(log: EventLog, action: Action, conversation_id: str) -> None:
    """Record in the log that another action had the same number before."""
    lost = EventsLost(conversation_id, action.id, action.id, OTHER)
    await record_gap(log, lost, noticed_by="a workspace host")


async def _record_gap_if_lost(log: EventLog, run: ActionRun, action_id: int, fingerprint: str) -> int:
    """Return the id of the gap event if the log has lost this action of the host; 0 if the log has the action."""
    conversation_id = run.conversation_id
    try:
        known = run.fingerprint
        if action_id != run.action.id:
            noted = await log.find_action(conversation_id, action_id)
            if noted is not None and noted.checksum:
                known = noted.fingerprint or fingerprint  # one that is in flight, or that its owner has settled
            else:
                known = await _read_fingerprint(log, conversation_id, action_id, is_noted=noted is not None)
        if known and fingerprint in ("", known):
            return 0
    except DeckhandsError:
        return 0  # the event exists but cannot be read here
    lost = EventsLost(conversation_id, await log.load_last_id(conversation_id), action_id, fingerprint)
    return await record_gap(log, lost, noticed_by="a workspace host")


async def _read_fingerprint(log: EventLog, conversation_id: str, action_id: int, *, is_noted: bool) -> str:
    """Return the fingerprint of an action that an earlier version of Deckhands dispatched; empty if there is none.

    Raises:
        DeckhandsError: the event exists, but cannot be read here.
    """
    try:
        entry = await log.load_entry(conversation_id, action_id)
        event = await log.decode_entry(conversation_id, entry, action_id)
        event = await log.blobs.restore_event(conversation_id, event)
    except CorruptEntry:
        return ""  # there is no such event
    except StoreMisconfigured:  # a tool worker may not read the log
        if is_noted:
            raise
        return ""
    return compute_fingerprint(event) if isinstance(event, Action) else ""
