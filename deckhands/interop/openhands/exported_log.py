"""Read a file of events that `deckhands export` wrote, as the start of another conversation.

Holds: events keep their ids, so references to them stay valid. A line that cannot be read is named, and its place is
filled: with a substitute for the result if an action waits for one, otherwise with a placeholder.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from broker.contract import ConversationCreated, Event, NullObservation
from broker.log import parse_exported_event
from broker.runtime import UsageError
from deckhands.client import build_fork
from deckhands.interop.openhands.recordings import (
    MAX_EVENTS,
    UNREADABLE,
    ImportFindings,
    check_fit,
    parse_json_value,
    read_text,
)
from deckhands.interop.openhands.results import is_result, make_missing_result, needs_result

MAX_MISSING = 1_000
"""The maximum number of consecutive missing events."""


def read_exported_log(path: Path, conversation_id: str) -> tuple[list[Event], ImportFindings]:
    """Read an exported log as that of a new conversation, and return the findings.

    Raises:
        UsageError: the file cannot be read, or holds no events.
    """
    findings = ImportFindings()
    found = _parse_events(read_text(path), findings)
    if not found:
        reasons = " ".join(findings.faults[:1])
        raise UsageError(f"The file {path} holds no events. {reasons}".strip(), remedy="Name another.")
    if not isinstance(found.get(1), ConversationCreated):
        findings.add_fault("The creation of the conversation", "its defaults are used instead")
        found[1] = ConversationCreated(id=1, conversation_id=conversation_id, title="An imported conversation")
    events = list(_fill_gaps(found, findings))
    return [build_fork(events, conversation_id).model_copy(update={"id": 1}), *events[1:]], findings


def _parse_events(text: str, findings: ImportFindings) -> dict[int, Event]:
    """Return the events of a file by their ids."""
    found: dict[int, Event] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if number > MAX_EVENTS:
            findings.add_fault(f"Everything after line {MAX_EVENTS}", f"at most {MAX_EVENTS} events are imported")
            break
        if not line.strip():
            continue
        try:
            fields = parse_json_value(line)
            if isinstance(fields, dict) and fields.get("summary") is True:
                continue  # the last line of `run --json`
            if isinstance(fields, dict):
                fields.pop("blobs", None)  # they would refer to texts of another store
            event = parse_exported_event(fields)
            if event.id < 1 or event.id in found or (isinstance(event, ConversationCreated) and event.id > 1):
                raise ValueError(f"there can be no event {event.id} here")
            check_fit(event)
        except UNREADABLE as error:
            findings.add_fault(f"Line {number}", error)
            continue
        found[event.id] = event
    return found


def _fill_gaps(found: Mapping[int, Event], findings: ImportFindings) -> Iterator[Event]:
    """Return the events in order, without gaps."""
    answered = {event.cause for event in found.values() if is_result(event)}
    settled = answered | {event.__dict__.get("replaces") for event in found.values()}
    waiting: deque[Event] = deque()
    last: Event | None = None
    is_whole = True
    for event_id in sorted(found):
        missing = event_id - (last.id if last else 0) - 1
        if missing > MAX_MISSING:
            findings.add_fault(f"Event {event_id} with all that follows", f"{missing} events before it are missing")
            break
        for _ in range(missing):
            assert last is not None  # the creation exists
            is_whole = False
            last = _make_substitute(waiting, last)
            yield last
        event = found[event_id]
        if event.cause is not None and not _is_action(found.get(event.cause)):
            event = event.model_copy(update={"cause": None})
        if needs_result(event) and event.id not in settled:
            waiting.append(event)
        last = event
        yield event
    if last is not None and (findings.fault_count or not is_whole):
        while waiting:  # it may have run, and its result may be among the missing events
            last = _make_substitute(waiting, last)
            yield last


def _make_substitute(waiting: deque[Event], last: Event) -> Event:
    """Return the substitute for a missing event."""
    if waiting:
        return make_missing_result(waiting.popleft(), event_id=last.id + 1, timestamp=last.timestamp)
    return NullObservation(id=last.id + 1, timestamp=last.timestamp)


def _is_action(event: Event | None) -> bool:
    return event is not None and event.kind.startswith("action.")
