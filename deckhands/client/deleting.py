"""Delete a conversation, if it is settled or closed, together with its finished delegates.

Holds: an interrupted deletion is completed by repeating it. A delegate is kept while its parent waits for it. A
delegate is deleted only if its own log or index names the parent, because forks and imported logs name the delegates of
other conversations.
Does not: ask for confirmation; `deckhands rm` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import datetime

from broker.contract import AgentState, ConversationCreated, DelegateEnded, Event, decode_any, is_settled
from broker.log import (
    RELEASE_LIMIT_SECONDS,
    ConversationQuery,
    ConversationRow,
    Conversations,
    Deletion,
    EventLog,
    NotDeleted,
    Selection,
    fold_status,
)
from broker.runtime import CorruptEntry, UnknownConversation, UsageError

QUESTION_PREFIX, QUESTION_LABELS = "question-", {"openhands": "question"}
"""The start of the ids of forks that answer questions, and their labels."""
ATTEMPTS = 5
"""How often a deletion is tried while the log still grows."""


async def delete(log: EventLog, conversation_id: str, *, limit_seconds: float = RELEASE_LIMIT_SECONDS) -> None:
    """Delete a conversation and its delegates with all of their keys; `Deletion.delete` lists the other errors.

    Raises:
        UsageError: the conversation is unknown or not settled, or it is a delegate that its parent waits for.
    """
    await _delete(log, conversation_id, limit_seconds, set())


async def delete_left_questions(log: EventLog, *, before: datetime) -> int:
    """Delete forks that answered questions and were left behind by a killed server; return how many there were.

    Other conversations with the same label are kept.
    """
    deleted, index = 0, Conversations(log.store)
    async for rows in ConversationQuery(log.store, Selection(labels=QUESTION_LABELS)).iterate_pages():
        for row in rows:
            if row.conversation_id.startswith(QUESTION_PREFIX) and row.updated < before:
                with contextlib.suppress(UnknownConversation, NotDeleted):  # gone, or deleted next time
                    await index.close(row.conversation_id)
                    await delete(log, row.conversation_id)
                    deleted += 1
    return deleted


def is_delegate_of(events: Sequence[Event], parent_id: str) -> bool:
    """Return whether a log, or its first event, belongs to a delegate of this conversation."""
    created = events[0] if events else None
    parent = created.parent if isinstance(created, ConversationCreated) else None
    return parent is not None and parent.conversation_id == parent_id


async def _delete(log: EventLog, conversation_id: str, limit_seconds: float, seen: set[str]) -> None:
    """Delete a conversation and its delegates, except those in `seen`."""
    seen.add(conversation_id)
    for attempt in range(ATTEMPTS):
        last_id = await _delete_delegates(log, conversation_id, limit_seconds, seen)
        try:
            await Deletion(log.store).delete(conversation_id, last_id=last_id, limit_seconds=limit_seconds)
            break
        except NotDeleted:
            # One that was just cancelled still gets the reports of those that have stopped.
            has_news = await log.load_last_id(conversation_id) > last_id
            if attempt == ATTEMPTS - 1 or not has_news:
                raise


async def _delete_delegates(log: EventLog, conversation_id: str, limit_seconds: float, seen: set[str]) -> int:
    """Check that a conversation may be deleted, and delete its delegates first; return its last event id."""
    index = Conversations(log.store)
    row = await index.load_row(conversation_id)
    try:
        events = await log.read(conversation_id, decode=decode_any)
        may_go = row.is_closed or fold_status(events).is_settled
    except CorruptEntry:  # rely on the parent that the index records
        events, may_go = [], row.is_closed or _is_deletable(row)
    if not may_go:
        raise UsageError(
            f"The conversation {conversation_id} is {row.state}; only a settled one can be deleted.",
            remedy="Cancel it first: `deckhands rm --cancel` does both.",
        )
    await _check_parent(index, conversation_id, events)
    for delegate_id in dict.fromkeys(event.conversation_id for event in events if isinstance(event, DelegateEnded)):
        with contextlib.suppress(UnknownConversation, CorruptEntry):  # it was deleted before, or names no parent
            first = await log.read(delegate_id, until=1, decode=decode_any)
            if delegate_id not in seen and is_delegate_of(first, conversation_id):
                await _delete(log, delegate_id, limit_seconds, seen)
    return events[-1].id if events else row.last_event_id


def _is_deletable(row: ConversationRow) -> bool:
    return row.state in set(AgentState) and is_settled(AgentState(row.state))


async def _check_parent(index: Conversations, conversation_id: str, events: list[Event]) -> None:
    """Refuse a delegate whose parent may still need it."""
    created = events[0] if events else None
    if not isinstance(created, ConversationCreated) or created.parent is None:
        return
    parent_id = created.parent.conversation_id
    with contextlib.suppress(UnknownConversation):
        parent = await index.load_row(parent_id)
        if not parent.is_closed and not _is_deletable(parent):
            raise UsageError(
                f"The conversation {conversation_id} is a delegate of {parent_id}, which is {parent.state}.",
                remedy="Delete that one when it is over; its delegates go with it.",
            )
