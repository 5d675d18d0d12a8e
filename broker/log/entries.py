"""Reads entries of a log: an id, and one field with the bytes of the event.

Holds: an error about a missing or unreadable entry names the event that was expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from broker.contract import Event, codec
from broker.runtime import CorruptEntry, StoreTooNew
from broker.store import KEY_ID_BYTES, Cipher, Store

BATCH = 32

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class NewEvents:
    """The events that an owner reads after a notification.

    Attributes:
        is_watched: a client watches replies as they are written; see `live_text`.
        checksum: checksum of the last event in the log.
        snapshot: the latest snapshot, if asked for; None without one.
    """

    events: list[Event]
    is_watched: bool
    checksum: str
    snapshot: bytes | None = None


def parse_entry(
    entry_id: bytes,
    fields: list[Any],
    expected_id: int,
    decode: codec.Decoder = codec.decode,
    cipher: Cipher | None = None,
) -> Event:
    """Parse the entry that must hold the event with the expected id.

    Args:
        decode: pass `codec.decode_any` if events are only displayed.
        cipher: that of an encrypted conversation, see `find_reader`.

    Raises:
        CorruptEntry, StoreTooNew: the entry has another id, or cannot be read. The message names the event.
    """
    if entry_id != b"%d-0" % expected_id:
        found = entry_id.partition(b"-")[0].decode()
        raise CorruptEntry(f"Event {expected_id} is missing from the log; the next one is {found}.")
    try:
        return decode(codec.decrypt_entry(_only_field(fields), cipher, expected_id), expected_id)
    except CorruptEntry as error:
        raise CorruptEntry(
            f"Event {expected_id} cannot be read: {error.message}", remedy="Restore the store from its last good copy."
        ) from error
    except StoreTooNew as error:
        raise type(error)(f"Event {expected_id} cannot be read: {error.message}", remedy=error.remedy) from error


async def find_reader(store: Store, conversation_id: str, entries: Sequence[Any]) -> Cipher | None:
    """Return the cipher that decrypts entries of a log; None if its conversation is not encrypted.

    Raises:
        DataLocked: it is encrypted, and this process has no key for it.
    """
    return await find_cipher_of(store, conversation_id, _last_value(entries[-1][1])) if entries else None


async def find_cipher_of(store: Store, conversation_id: str, entry: bytes) -> Cipher | None:
    """Return the cipher of a conversation for one of its entries; see `Encryption.find_cipher_of`."""
    return await store.encryption.find_cipher_of(conversation_id, codec.find_key_id(entry, KEY_ID_BYTES))


def _last_value(fields: list[Any]) -> bytes:
    return fields[-1] if fields else b""


def _only_field(fields: list[Any]) -> bytes:
    if len(fields) != 2 or fields[0] != b"e":
        raise CorruptEntry("Its entry does not have exactly the field of an event.")
    entry: bytes = fields[1]
    return entry


def is_first_entry(entries: list[Any], event_id: int, checksum: str) -> bool:
    """Return whether the first of these entries has this id and, unless empty, this checksum."""
    if not entries or entries[0][0] != b"%d-0" % event_id:
        return False
    return not checksum or codec.checksum_of(entries[0][1][-1]) == checksum


async def find_latest_event(store: Store, conversation_id: str, kind: type[E]) -> E | None:
    """Return the latest event of a class; None if there is none. Reads backwards from the end of the log.

    Raises:
        CorruptEntry: a later entry is damaged. The message names the event.
    """
    stream, end = (await store.locate(conversation_id)).events, "+"
    while True:
        batch = await store.call("XREVRANGE", stream, end, "-", "COUNT", BATCH)
        event_id, cipher = 0, await find_reader(store, conversation_id, batch)
        for entry_id, fields in batch:
            event_id = int(entry_id.partition(b"-")[0])
            event = parse_entry(entry_id, fields, event_id, codec.decode_any, cipher)
            if isinstance(event, kind):
                return event
        if len(batch) < BATCH or event_id == 1:
            return None
        end = f"{event_id - 1}-0"
