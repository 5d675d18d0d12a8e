"""Reads entries of a log: an id, and one field with the bytes of the event.

The text form of a log has one event per line; `deckhands export` writes it and a replay reads it.

Holds: an error about a missing or unreadable entry names the event that was expected.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from broker.contract import Event, codec, event_from_wire
from broker.runtime import CorruptEntry, StoreTooNew, UnknownKind
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


def parse_entries(
    entries: Sequence[Any], after: int, decode: codec.Decoder = codec.decode, cipher: Cipher | None = None
) -> list[Event]:
    """Parse the entries that must hold the events after a given one. Raises the same errors as `parse_entry`.

    The garbage collector pauses meanwhile: events make no cycles, and it would walk over them again and again.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        return [
            parse_entry(entry_id, fields, after + n, decode, cipher) for n, (entry_id, fields) in enumerate(entries, 1)
        ]
    finally:
        if is_on:
            gc.enable()


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


def render_event_line(event: Event) -> str:
    """Return an event as one line of ASCII JSON."""
    return json.dumps(event.export())


def parse_exported_event(fields: Any) -> Event:
    """Return the event from an object that `Event.export` made.

    Raises:
        CorruptEntry: fields are missing or invalid.
        UnknownKind: this version does not know the kind.
    """
    if not isinstance(fields, dict) or not isinstance(fields.get("id"), int):
        raise CorruptEntry("It is not an object with an id.")
    wire = dict(fields)
    event_id = wire.pop("id")
    wire["cause"] = wire.pop("cause_id", None)
    return event_from_wire({name: value for name, value in wire.items() if value is not None}, event_id)


def parse_lines(lines: Iterable[str], *, source: str) -> list[Event]:
    """Parse a log. Lines with a summary, such as the last one of `run --json`, are skipped.

    Args:
        source: source of the lines, for errors.

    Raises:
        CorruptEntry: a line is not an event, or not the next one. The message names the line.
    """
    events: list[Event] = []
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line) if line.strip() else {"summary": True}
            if isinstance(fields, dict) and fields.get("summary") is True:
                continue
            event = parse_exported_event(fields)
        except (ValueError, CorruptEntry, UnknownKind) as error:
            raise CorruptEntry(f"Line {number} of {source} is not an event: {error}") from error
        if event.id != len(events) + 1:
            raise CorruptEntry(f"Line {number} of {source} has event {event.id} where {len(events) + 1} is expected.")
        events.append(event)
    return events
