"""Finds the latest event of a class, reading backwards from the end of a log.

Does not: read the whole log unless there is no such event.
"""

from __future__ import annotations

from typing import TypeVar

from broker.contract import Event, decode_any
from broker.log.entries import decoded
from broker.store import Store

BATCH = 32

E = TypeVar("E", bound=Event)


async def find_latest_event(store: Store, conversation_id: str, kind: type[E]) -> E | None:
    """Return the latest event of a class; None if there is none.

    Raises:
        CorruptEntry: a later entry is damaged. The message names the event.
    """
    stream, end = store.keys(conversation_id).events, "+"
    while True:
        batch = await store.call("XREVRANGE", stream, end, "-", "COUNT", BATCH)
        event_id = 0
        for entry_id, fields in batch:
            event_id = int(entry_id.partition(b"-")[0])
            event = decoded(entry_id, fields, event_id, decode_any)
            if isinstance(event, kind):
                return event
        if len(batch) < BATCH or event_id == 1:
            return None
        end = f"{event_id - 1}-0"
