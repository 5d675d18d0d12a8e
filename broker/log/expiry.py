"""Conversations that have not begun in time: what is written into their logs, by the first worker that notices.

Holds: one that has begun is left alone, because the store decides it in the append. Repeating it is harmless.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress

from broker.contract import AgentState, AgentStateChangedObservation
from broker.log.event_log import EventLog
from broker.runtime import ConversationBusy, DeckhandsError, UnknownConversation, about

NOT_BEGUN = "ConversationExpired: The conversation was not begun before it expired"
EXPIRED_CODE = "expired"

_log = logging.getLogger(__name__)


async def expire(log: EventLog, conversation_ids: Iterable[str]) -> None:
    """End conversations that wait to begin and whose time is over. Idempotent; raises nothing."""
    for conversation_id in conversation_ids:
        try:
            with suppress(ConversationBusy, UnknownConversation):  # it has begun, or is gone
                await _expire(log, conversation_id)
        except (DeckhandsError, ValueError):  # damaged keys of one conversation concern no other
            _log.exception(
                "conversation %s cannot be ended, though it has expired", conversation_id, extra=about(conversation_id)
            )


async def _expire(log: EventLog, conversation_id: str) -> None:
    end = AgentStateChangedObservation(agent_state=AgentState.ERROR, reason=NOT_BEGUN, code=EXPIRED_CODE)
    fields = {
        "state": AgentState.ERROR.value,
        "planned": "over",
        "wait_reason": "",
        "last_error": NOT_BEGUN,
        "error_code": EXPIRED_CODE,
    }
    await log.append(conversation_id, [end], key=EXPIRED_CODE, condition="expire", fields=fields)
