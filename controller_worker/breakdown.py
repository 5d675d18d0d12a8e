"""What is left to do for a conversation when something broke that nobody foresaw: say so in its log, and let go of it.

Holds: an error of one conversation becomes an event of it; nothing is written under a token that is not current.
"""

from __future__ import annotations

import logging

from broker.agent_state import AgentState
from broker.event_log import Closed, Conflict, EventLog, Fenced
from broker.observations import AgentStateChangedObservation
from broker.ownership import Owners, Ownership
from controller_worker.announcement import end_in_error
from controller_worker.delegates import report_breakdown
from controller_worker.effects import Append
from controller_worker.failures import code_of, last_error_of
from controller_worker.state import State

MAX_ROUNDS = 16
"""How often news may come in between; each time the same is said again."""

_log = logging.getLogger(__name__)


async def rest_in_error(
    log: EventLog, owners: Owners, ownership: Ownership, state: State | None, *, error: Exception
) -> None:
    """Record an error and give the conversation up until somebody speaks up.  Raises nothing.

    Args:
        state: the state of the conversation as far as it was read, None where it was not.
    """
    try:
        for _ in range(MAX_ROUNDS):
            if await _has_rested(log, owners, ownership, state, error=error):
                break
        await report_breakdown(log, ownership.conversation_id, last_error_of(error))
    except Exception:  # noqa: BLE001  (the outermost edge: a conversation must not end its neighbours)
        _log.exception("conversation %s: its error could not be recorded", ownership.conversation_id)


async def _has_rested(
    log: EventLog, owners: Owners, ownership: Ownership, state: State | None, *, error: Exception
) -> bool:
    """Append the error and release the conversation. False when there is news; it gets the same answer."""
    (last_id,) = await owners.last_ids([ownership.conversation_id])
    reason, code = last_error_of(error), code_of(error)
    if state is not None and state.version == last_id:
        wanted = end_in_error(state, reason, code=code)
    else:  # what is pending is not known
        wanted = Append((AgentStateChangedObservation(agent_state=AgentState.ERROR, reason=reason, code=code),))
    outcome = await log.append_as_owner(
        ownership,
        wanted.events,
        expected_last_id=last_id,
        answers=dict(wanted.answers),
        cancels=wanted.cancels,
        fields={"state": AgentState.ERROR.value, "wait_reason": "", "last_error": reason, "error_code": code},
    )
    if isinstance(outcome, Fenced):
        return True
    if isinstance(outcome, Conflict):
        return False
    seen_id = last_id if isinstance(outcome, Closed) else outcome.last_id
    return await owners.release(ownership, seen_id=seen_id) is None
