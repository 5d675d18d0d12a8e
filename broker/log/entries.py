"""Entries of a log as the store hands them out: an id, and one field with the bytes of the event.

Holds: an entry that is not the one expected, or cannot be read, is named by the event it should be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from broker.contract import Event, codec
from broker.runtime import CorruptEntry, StoreTooNew


@dataclass(frozen=True, slots=True)
class NewEvents:
    """What an owner reads after a notification.

    Attributes:
        is_watched: somebody looks on while replies are written; see `live_text`.
        checksum: of the last event there is.
    """

    events: list[Event]
    is_watched: bool
    checksum: str


def decoded(entry_id: bytes, fields: list[Any], expected_id: int, decode: codec.Decoder = codec.decode) -> Event:
    """Return the event of an entry that is to be the one with the expected id.

    Args:
        decode: `codec.decode_any` for those who only show events.

    Raises:
        CorruptEntry, StoreTooNew: it is another, or cannot be read; both name the event.
    """
    if entry_id != b"%d-0" % expected_id:
        found = entry_id.partition(b"-")[0].decode()
        raise CorruptEntry(f"Event {expected_id} is missing from the log; the next one is {found}.")
    try:
        return decode(_only_field(fields), expected_id)
    except CorruptEntry as error:
        raise CorruptEntry(
            f"Event {expected_id} cannot be read: {error.message}", remedy="Restore the store from its last good copy."
        ) from error
    except StoreTooNew as error:
        raise StoreTooNew(f"Event {expected_id} cannot be read: {error.message}", remedy=error.remedy) from error


def _only_field(fields: list[Any]) -> bytes:
    if len(fields) != 2 or fields[0] != b"e":
        raise CorruptEntry("Its entry has not the one field that an event has.")
    entry: bytes = fields[1]
    return entry


def is_at(entries: list[Any], event_id: int, checksum: str) -> bool:
    """Say whether the first of these entries is the event that somebody knows by its id and, unless empty, checksum."""
    if not entries or entries[0][0] != b"%d-0" % event_id:
        return False
    return not checksum or codec.checksum_of(entries[0][1][-1]) == checksum
