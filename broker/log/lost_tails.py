"""Detects logs that have lost their end, and records the loss in the log.

If a store comes back with an older append-only file, or fails over to a replica that was behind, it assigns the ids of
lost events again. A process that remembers a lost event by id and checksum appends `EventsLostObservation`.

Holds: each gap is recorded once, by an event that users and the model can read.
Does not: restore events, or detect a loss that no process remembers. Two losses of the same ids within a short time may
be recorded once.
Keys: the field `gap` of `deck:{k}:c:<id>:meta`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import cast

from broker.contract import Event, EventsLostObservation, codec
from broker.coordination import settle_results
from broker.log.append_call import Closed
from broker.log.event_log import EventLog
from broker.runtime import CorruptEntry, DeckhandsError, EventsLost, UnknownConversation
from broker.store import Store

_log = logging.getLogger(__name__)

CHECKSUM_DIGITS = 8
REPORTED = re.compile(r"([0-9]{1,15}):([0-9a-f]{0,64})")
ENDED = "event {known} had been written, and the log ended at event {last}."
CHANGED = "event {known} was a different event before."
NAMED = re.compile(rb"(\d{1,18}):(\d{1,18})")
NOTICE = (
    "The store lost events of this conversation: {what} The lost events may have taken effect: the workspace, and "
    "anything else they changed, may be ahead of this conversation. Check the current state before you continue "
    "or repeat anything."
)


async def record_gap(log: EventLog, lost: EventsLost, *, noticed_by: str) -> int:
    """Record in the log that it has lost events, unless this is recorded already. Idempotent.

    Args:
        lost: the loss that was detected.
        noticed_by: the process that remembers the events, for users.

    Returns:
        The last id before the record, at most; 0 if nothing was recorded because the conversation is closed or gone.
    """
    conversation_id, known_id = lost.conversation_id, lost.known_id
    try:
        ended, known = await _load_recorded_gap(log.store, conversation_id)
        if known_id <= known:
            return ended + 1
        last_id = await log.load_last_id(conversation_id)
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


async def record_reported_gap(log: EventLog, conversation_id: str, gap: str) -> None:
    """Record a loss that a tool worker has reported, if the log does not hold the action. Never raises.

    Args:
        gap: `<action>:<checksum or fingerprint>`. A tool worker may forge it, so a loss that the log disproves is
            ignored.
    """
    try:
        if (said := REPORTED.fullmatch(gap)) is not None:
            known_id, mark = int(said[1]), said[2]
            last_id = await log.load_last_id(conversation_id)
            if known_id > last_id or not await _is_there(log, conversation_id, known_id, mark):
                await record_gap(log, EventsLost(conversation_id, last_id, known_id, mark), noticed_by="a tool worker")
        await settle_results(log.store, conversation_id, checked_gap=gap)
    except DeckhandsError as error:
        _log.warning("a loss that was reported for %s is not recorded: %s", conversation_id, error)


async def _is_there(log: EventLog, conversation_id: str, event_id: int, mark: str) -> bool:
    """Return whether the log contains an event with this checksum, or may contain an action with this fingerprint."""
    if len(mark) in (0, CHECKSUM_DIGITS):
        with suppress(CorruptEntry):
            return not mark or codec.checksum_of(await log.load_entry(conversation_id, event_id)) == mark
        return False
    noted = await log.find_action(conversation_id, event_id)
    return noted is None or noted.fingerprint in ("", mark)  # the store knows none until the action is settled


async def tail_recording_gaps(
    log: EventLog, conversation_id: str, *, after: int, decode: codec.Decoder
) -> AsyncGenerator[Event, None]:
    """Yield the events of `EventLog.tail`, and record a gap that it finds.

    Raises:
        EventsLost: the store came back without events that this call has yielded. The gap is recorded in the log. To
            read on, follow the log again from its beginning.
    """
    tail = cast("AsyncGenerator[Event, None]", log.tail(conversation_id, after=after, decode=decode))
    try:
        async with aclosing(tail) as events:
            async for event in events:
                yield event
    except EventsLost as lost:
        if lost.checksum:  # the event was read, not only assumed
            await record_gap(log, lost, noticed_by="a client that followed the conversation")
        raise


async def record_snapshot_gap(log: EventLog, conversation_id: str, version: int) -> None:
    """Record in the log that it ends before its snapshot; see `record_gap`."""
    lost = EventsLost(conversation_id, await log.load_last_id(conversation_id), version)
    await record_gap(log, lost, noticed_by="a snapshot")


async def _load_recorded_gap(store: Store, conversation_id: str) -> tuple[int, int]:
    """Return the last id of the log at its latest recorded gap, and the last id known to be lost.

    Both are 0 if no gap was recorded.
    """
    meta = (await store.locate(conversation_id)).meta
    found = await store.call("HGET", meta, "gap")
    said = NAMED.fullmatch(found or b"0:0")
    return (int(said[1]), int(said[2])) if said else (0, 0)  # damaged: the gap is recorded again
