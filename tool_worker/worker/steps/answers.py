"""Reads an action, and answers it if it cannot or must not run.

Holds: every failure except one of the store becomes the action's observation; an unconfirmed action never runs.
"""

from __future__ import annotations

import logging
import traceback

from broker.contract import (
    Action,
    ConfirmationStatus,
    ErrorObservation,
    Observation,
    OpenWorkspaceAction,
    OutcomeUnknownObservation,
    WorkspaceFailedObservation,
)
from broker.log import EventLog
from broker.runtime import CorruptEntry, DeckhandsError, StoreError, StoreTooNew, UnknownKind
from tool_worker.tools import to_answer
from tool_worker.worker.steps.action_run import ActionRun, RestOfAction

MAX_ATTEMPTS = 3

_log = logging.getLogger(__name__)


async def read_action(log: EventLog, run: ActionRun, rest: RestOfAction) -> Observation:
    """Decode the action and fetch its long texts."""
    try:
        event = await log.blobs.restore_event(run.conversation_id, run.event)
    except (CorruptEntry, StoreTooNew, UnknownKind) as error:
        return ErrorObservation(content=str(error), error_id=error.code, cause=run.delivery.action_id)
    assert isinstance(event, Action)
    run.action = event
    return await rest(run)


async def answer_failures(log: EventLog, run: ActionRun, rest: RestOfAction) -> Observation:
    """Turn every failure of the inner steps into the action's observation."""
    try:
        return to_answer(run.action, await rest(run))
    except StoreError:
        raise
    except DeckhandsError as error:
        return to_answer(run.action, ErrorObservation(content=str(error), error_id=error.code))
    except Exception as error:  # noqa: BLE001  (the outer edge: it becomes an observation)
        text = traceback.format_exc()
        if log.secrets is not None:  # it may contain a command's input
            text = (await log.secrets.load_masker(run.conversation_id)).mask_text(text)
        _log.error("action %s of %s\n%s", run.action.id, run.conversation_id, text)
        text = f"The action could not be run: {type(error).__name__}: {error}"
        return to_answer(run.action, ErrorObservation(content=text))


async def require_confirmation(run: ActionRun, rest: RestOfAction) -> Observation:
    """Refuse an action that has not been confirmed."""
    status = getattr(run.action, "confirmation_state", ConfirmationStatus.CONFIRMED)
    if status is not ConfirmationStatus.CONFIRMED:
        text = "The action was not run: it has not been confirmed."
        return ErrorObservation(content=text, error_id="not_confirmed")
    return await rest(run)


async def refuse(run: ActionRun, rest: RestOfAction) -> Observation:
    """Answer an action that no node serves."""
    if run.refusal is None:
        return await rest(run)
    text = f"The action was not run. {run.refusal}"
    if isinstance(run.action, OpenWorkspaceAction):
        return WorkspaceFailedObservation(content=text, code=run.refusal.code)
    return ErrorObservation(content=text, error_id=run.refusal.code)


async def limit_attempts(run: ActionRun, rest: RestOfAction) -> Observation:
    """Answer an action without running it if too many workers have died during it."""
    if run.claim.attempt > MAX_ATTEMPTS:
        text = f"The action was abandoned after {MAX_ATTEMPTS} workers died with it. It may have taken effect."
        return OutcomeUnknownObservation(content=text)
    return await rest(run)
