"""Logs that have lost their end: how it is noticed, and how it gets into the log.

A store that comes back with an older append-only file, or fails over to a replica that was behind, gives the numbers of
lost events to others. A process that still remembers a lost event, by its number and checksum, says so in the log.

Holds: each gap is named once, by an event that people and the model read.
Does not: bring anything back, or notice a loss that nobody remembers. Two losses shortly after each other that
concern the same numbers may be named once.
Keys: the field `gap` of `deck:{k}:c:<id>:meta`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

from broker.contract import Event, EventsLostObservation, codec
from broker.log.event_log import Closed, EventLog
from broker.runtime import EventsLost, UnknownConversation
from broker.store import Store

ENDED = "event {known} had been written, and the log ended at event {last}."
CHANGED = "event {known} was a different event before."
NAMED = re.compile(rb"(\d{1,18}):(\d{1,18})")
NOTICE = (
    "The store lost events of this conversation: {what} The lost events may have taken effect: the workspace, and "
    "anything else they changed, may be ahead of this conversation. Check the current state before you continue "
    "or repeat anything."
)


async def name_gap(log: EventLog, lost: EventsLost, *, noticed_by: str) -> int:
    """Say in the log that it has lost events, unless it says so already. Idempotent.

    Args:
        lost: what was lost, as it was noticed.
        noticed_by: who remembers, for people.

    Returns:
        About where in the log it is said: no event that is older has a higher id. 0: nowhere, the conversation is
        closed or gone.
    """
    conversation_id, known_id = lost.conversation_id, lost.known_id
    try:
        ended, known = await _named(log.store, conversation_id)
        if known_id <= known:
            return ended + 1
        last_id = await log.last_id(conversation_id)
        what = ENDED if last_id < known_id else CHANGED
        event = EventsLostObservation(
            content=NOTICE.format(what=what.format(known=known_id, last=last_id)),
            last_id=last_id,
            known_id=known_id,
            noticed_by=noticed_by,
        )
        key = f"gap:{known_id}:{lost.checksum}"
        outcome = await log.append(conversation_id, [event], key=key, fields={"gap": f"{last_id}:{known_id}"})
    except UnknownConversation:
        return 0
    return 0 if isinstance(outcome, Closed) else outcome.last_id


async def followed(
    log: EventLog, conversation_id: str, *, after: int, decode: codec.Decoder
) -> AsyncGenerator[Event, None]:
    """Yield what `EventLog.tail` yields, and name a gap that it runs into.

    Raises:
        EventsLost: the store came back without events that this call has yielded. The log names the gap then; to read
            further, follow it again from its beginning.
    """
    tail = cast("AsyncGenerator[Event, None]", log.tail(conversation_id, after=after, decode=decode))
    try:
        async with aclosing(tail) as events:
            async for event in events:
                yield event
    except EventsLost as lost:
        if lost.checksum:  # it was really seen
            await name_gap(log, lost, noticed_by="a client that followed the conversation")
        raise


async def name_snapshot_gap(log: EventLog, conversation_id: str, version: int) -> None:
    """Say in the log that it ends before its snapshot does; see `name_gap`."""
    lost = EventsLost(conversation_id, await log.last_id(conversation_id), version)
    await name_gap(log, lost, noticed_by="a snapshot")


async def _named(store: Store, conversation_id: str) -> tuple[int, int]:
    """Return where the log ended when it named a gap last, and what was known to be lost; (0, 0) for never."""
    meta = store.keys(conversation_id).meta
    found = await store.call("HGET", meta, "gap")
    said = NAMED.fullmatch(found or b"0:0")
    return (int(said[1]), int(said[2])) if said else (0, 0)  # damaged: the gap is named once more
