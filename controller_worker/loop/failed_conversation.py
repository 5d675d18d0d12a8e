"""The end of a conversation's work after an unforeseen error: record the error in the log and release the conversation.

A log with an event that only a newer version can read is no failure: it is left to a newer worker. The same holds for a
log that is encrypted with an unknown key, and for a conversation pinned to another version.

Holds: an error of one conversation becomes an event of it. Nothing is written under an outdated token.
"""

from __future__ import annotations

import logging

from broker.contract import AgentState, AgentStateChangedObservation, Ownership
from broker.coordination import Owners
from broker.log import Closed, Conflict, EventLog, Fenced, WaitReason
from broker.runtime import DataLocked, FunctionsReplaced, StoreTooNew, UnknownKind
from broker.secrets import SecretsLocked
from controller_worker.core import Append, State, end_in_error, find_error_code, render_last_error
from controller_worker.loop.delegates import report_failure
from controller_worker.loop.owned_log import OwnedLog, PinnedElsewhere
from controller_worker.loop.services import Services

MAX_ROUNDS = 16
"""Attempts while new events keep arriving; each records the same error. After the last one the conversation is claimed
again.
"""
LEFT_SECONDS = 10.0
"""Time before a worker checks again whether there is a newer one."""

_log = logging.getLogger(__name__)


async def rest_in_error(services: Services, owned: OwnedLog, error: Exception) -> bool:
    """Record an error and release the conversation until a user resumes it. Raises nothing.

    Args:
        error: not recorded if another worker can continue the conversation; see `_leave_to_others`.

    Returns:
        False if the conversation is still owned, because new events kept arriving or the store currently refuses this
        worker's function calls. The caller must claim it again.
    """
    log = services.log
    owners = services.owners
    ownership = owned.ownership
    try:
        if isinstance(error, FunctionsReplaced):
            # Usually the next heartbeat fails too and the worker starts over, unless the functions are back by then.
            return False
        if (reason := _find_reason_to_leave(error)) is not None:
            text = "conversation %s is left to another worker (%s): %s"
            _log.warning(text, ownership.conversation_id, reason.value, error)
            return await _leave_to_others(log, owners, ownership, reason)
        _log.error("conversation %s failed", ownership.conversation_id, exc_info=error)
        try:
            return await _rest(log, owners, owned, error=error)
        except SecretsLocked as locked:
            # Masking is not possible here, and this error's own text contains no secrets.
            return await _rest(EventLog(services.store), owners, owned, error=locked)
    except Exception:  # noqa: BLE001  (the outermost edge: a conversation must not end its neighbours)
        _log.exception("conversation %s: its error could not be recorded", ownership.conversation_id)
    return True


async def _rest(log: EventLog, owners: Owners, owned: OwnedLog, *, error: Exception) -> bool:
    for _ in range(MAX_ROUNDS):
        if await _try_to_rest(log, owners, owned, error=error):
            return True
    return False


def _find_reason_to_leave(error: Exception) -> WaitReason | None:
    """Return why only another worker can continue the conversation; None if the error belongs to the conversation."""
    if isinstance(error, DataLocked):
        return WaitReason.LOCKED
    if isinstance(error, PinnedElsewhere):
        return WaitReason.PINNED_VERSION
    return WaitReason.NEWER_WORKER if isinstance(error, UnknownKind | StoreTooNew) else None


async def _leave_to_others(log: EventLog, owners: Owners, ownership: Ownership, reason: WaitReason) -> bool:
    """Release the conversation unchanged; after a while, this worker or another one claims it."""
    for _ in range(MAX_ROUNDS):
        (last_id,) = await owners.load_last_ids([ownership.conversation_id])
        outcome = await log.append_as_owner(
            ownership, (), expected_last_id=last_id, fields={"wait_reason": reason.value}
        )
        if isinstance(outcome, Fenced):
            return True
        has_new_events = isinstance(outcome, Conflict)
        if not has_new_events and await owners.release(ownership, seen_id=last_id, delay_seconds=LEFT_SECONDS) is None:
            return True
    return False


async def _load_state(owned: OwnedLog, last_id: int) -> State | None:
    """Return the state at the end of the log; None if the log was not read yet or cannot be read."""
    if not owned.is_restored:
        return None
    if owned.state.version < last_id:
        owned.has_new_events = True
        try:
            await owned.catch_up()
        except Exception:  # noqa: BLE001  (the log may be what has failed; its error is recorded all the same)
            text = "conversation %s: its new events cannot be read"
            _log.warning(text, owned.ownership.conversation_id, exc_info=True)
    return owned.state if owned.state.version == last_id else None


async def _try_to_rest(log: EventLog, owners: Owners, owned: OwnedLog, *, error: Exception) -> bool:
    """Append the error, release the conversation and report to its parent. Return False if there are new events.

    If another worker owns it, return True without a report.
    """
    ownership = owned.ownership
    (last_id,) = await owners.load_last_ids([ownership.conversation_id])
    state = await _load_state(owned, last_id)
    reason = render_last_error(error)
    code = find_error_code(error)
    if state is not None:
        wanted = end_in_error(state, reason, code=code)
    else:  # the pending actions are unknown
        wanted = Append((AgentStateChangedObservation(agent_state=AgentState.ERROR, reason=reason, code=code),))
    outcome = await log.append_as_owner(
        ownership,
        wanted.events,
        expected_last_id=last_id,
        answers=dict(wanted.answers),
        cancels=wanted.cancels,
        fields={
            "state": AgentState.ERROR.value,
            "busy": "",
            "wait_reason": "",
            "last_error": reason,
            "error_code": code,
        },
    )
    if isinstance(outcome, Fenced):
        return True
    if isinstance(outcome, Conflict):
        return False
    seen_id = last_id if isinstance(outcome, Closed) else outcome.last_id
    if await owners.release(ownership, seen_id=seen_id) is not None:
        return False
    await report_failure(log, ownership.conversation_id, reason)
    return True
