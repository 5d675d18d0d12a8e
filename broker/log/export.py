"""A log as text with one event per line, as `deckhands export` writes it and a replay reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from broker.contract import Event, event_from_wire
from broker.runtime import CorruptEntry, UnknownKind


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
