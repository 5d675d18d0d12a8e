"""Append producers' requests to the log of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from broker.contract import Event
from broker.log import Closed, Condition, EventLog
from broker.runtime import UsageError


async def append(
    log: EventLog,
    conversation_id: str,
    events: Sequence[Event],
    *,
    key: str | None = None,
    condition: Condition = "",
    seen_id: int | None = None,
    fields: Mapping[str, str] | None = None,
) -> None:
    """Append events as a producer; `EventLog.append` lists the other errors.

    Args:
        log: the log that masks secrets, for text that a user wrote.
        seen_id: the id that the last event must have; None: any.
        fields: fields of the index to write with the events.

    Raises:
        UsageError: the conversation is closed.
    """
    outcome = await log.append(conversation_id, events, key=key, condition=condition, seen_id=seen_id, fields=fields)
    if isinstance(outcome, Closed):
        raise UsageError(f"The conversation {conversation_id} is closed.", remedy="Submit the task as a new one.")
