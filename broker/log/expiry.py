"""Ends conversations that did not start in time. The first worker that notices one appends its end.

Holds: a conversation that has started is left alone, because the store checks this in the append. Idempotent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress

from broker.contract import AgentState, AgentStateChangedObservation
from broker.log.event_log import EventLog
from broker.runtime import ConversationBusy, DeckhandsError, UnknownConversation, make_extra

NOT_STARTED = "ConversationExpired: The conversation was not begun before it expired"
EXPIRED_CODE = "expired"

_log = logging.getLogger(__name__)


async def expire(log: EventLog, conversation_ids: Iterable[str]) -> None:
    """End scheduled conversations whose time limit has passed. Idempotent; raises nothing."""
    for conversation_id in conversation_ids:
        try:
            with suppress(ConversationBusy, UnknownConversation):  # it has started, or is gone
                await _expire(log, conversation_id)
        except (DeckhandsError, ValueError):  # damaged keys of one conversation must not affect others
            _log.exception("cannot end the expired conversation %s", conversation_id, extra=make_extra(conversation_id))


async def _expire(log: EventLog, conversation_id: str) -> None:
    end = AgentStateChangedObservation(agent_state=AgentState.ERROR, reason=NOT_STARTED, code=EXPIRED_CODE)
    fields = {
        "state": AgentState.ERROR.value,
        "planned": "over",
        "wait_reason": "",
        "last_error": NOT_STARTED,
        "error_code": EXPIRED_CODE,
    }
    await log.append(conversation_id, [end], key=EXPIRED_CODE, condition="expire", fields=fields)
