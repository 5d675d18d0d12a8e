"""Recorded files of other programs: read within bounds, event by event, with a record of unusable parts.

Holds: the content of a file cannot cause unbounded memory, depth or time, and an unreadable event costs only that
event, not the file. Non-finite numbers (NaN, infinities) count as missing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from broker.contract import MAX_JSON_DEPTH, SHORTEN_ABOVE_BYTES, Event, pack, to_entry, to_plain_json
from broker.runtime import CorruptEntry, EventUnfit, UnknownKind, UsageError

MAX_FILE_BYTES = 128 << 20
"""The limit of a file, and of all events of a directory."""
MAX_EVENT_CHARS = 48 << 20
"""The limit of an event as JSON: the largest in a log, with everything escaped."""
MAX_MARKS = 16_000_000
"""Commas and opening brackets in a file: parsed, an empty list takes 20 times the memory of its two characters."""
MAX_EVENTS = 200_000
MAX_FAULTS = 1_000
"""Values of a list that are not JSON. Finding the end of each takes a scan of the rest of the file."""
TOO_LONG = f"it is longer than {MAX_EVENT_CHARS >> 20} MiB"
NAMED_FAULTS = 20
MAX_REASON_CHARS = 300

LOST_IDS = "ids of events that a condensation forgets and that are not here"
UNREADABLE = (CorruptEntry, EventUnfit, UnknownKind, LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""The errors of an event that does not have the expected form."""

_BLANK = re.compile(r"[ \t\r\n]*")
# A text without an end is one token, too: looking for the end from each of its quotes would take quadratic time.
_MARK = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[][{},]', re.DOTALL)
_NO_NUMBERS = tuple(map(msgpack.packb, (math.inf, -math.inf, math.nan)))
_JSON: TypeAdapter[Any] = TypeAdapter(Any)
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


@dataclass(slots=True)
class ImportFindings:
    """The parts that an import could not carry over.

    Attributes:
        left_out: descriptions of parts without an equivalent, with their counts.
        faults: the first unreadable parts, each with its place and the reason.
        fault_count: the number of unreadable parts.
    """

    left_out: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    fault_count: int = 0

    def add_fault(self, what: str, reason: str | Exception) -> None:
        """Record an unreadable part, and the reason."""
        self.fault_count += 1
        if len(self.faults) < NAMED_FAULTS:
            text = " ".join(_describe_reason(reason).split())
            text = text if len(text) <= MAX_REASON_CHARS else text[:MAX_REASON_CHARS] + "…"
            self.faults.append(f"{what} cannot be read and is left out: {text}")

    def lines(self) -> Iterator[str]:
        """Return the findings, one line each."""
        yield from self.faults
        if self.fault_count > len(self.faults):
            yield f"{self.fault_count - len(self.faults)} more cannot be read and are left out."
        for what, count in sorted((+self.left_out).items()):
            yield f"Left out: {count} {what}."


def read_text(path: Path) -> str:
    """Read a text file; bytes that are not UTF-8 become U+FFFD.

    Raises:
        UsageError: the file cannot be read, is not a regular file, or is too large.
    """
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
            raise UsageError(f"{path} is not a file.", remedy="Name another file.")
        with path.open("rb") as file:
            is_large = os.fstat(file.fileno()).st_size > MAX_FILE_BYTES
            content = b"" if is_large else file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise UsageError(f"The file {path} cannot be read: {error.strerror}.", remedy="Name another file.") from error
    if is_large:
        raise UsageError(f"The file {path} is larger than {MAX_FILE_BYTES >> 20} MiB.", remedy="Name a smaller file.")
    text = content.decode("utf-8-sig", "replace")
    if sum(map(text.count, ",[{")) > MAX_MARKS:
        raise UsageError(f"The file {path} holds more than {MAX_MARKS} values.", remedy="Name a smaller file.")
    return text


def parse_json_value(text: str) -> Any:
    """Parse one JSON value in a form that the log can keep.

    Raises:
        ValueError: the value is invalid, too long, or nested too deeply.
    """
    if len(text) > MAX_EVENT_CHARS:
        raise ValueError(TOO_LONG)
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        # Most texts are plain JSON already; others are parsed again below, and converted or refused there.
        with contextlib.suppress(ValueError, OverflowError, TypeError):
            value = _JSON.validate_json(text)  # refuses lone surrogates
            packed = msgpack.packb(value)  # refuses integers beyond 64 bits
            if not any(no_number in packed for no_number in _NO_NUMBERS):
                return value
    try:
        return to_plain_json(json.loads(text, parse_constant=lambda _: None))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_event_list(text: str, findings: ImportFindings) -> Iterator[tuple[int, dict[str, Any]]]:
    """Return the objects of a JSON list with their positions; other items of the list are recorded as faults.

    Raises:
        ValueError: the text is not a list, or most of its items are not JSON.
    """
    at = _after_blanks(text, 0)
    if text[at : at + 1] != "[":
        raise ValueError("it does not start with [")
    at = _after_blanks(text, at + 1)
    if text[at : at + 1] == "]":
        return
    for position in range(MAX_EVENTS):
        value, reason, end = _parse_next_value(text, at)
        if reason:
            findings.add_fault(f"Event {position}", reason)
            if findings.fault_count > MAX_FAULTS:
                raise ValueError(f"more than {MAX_FAULTS} of its events are not JSON")
        elif isinstance(value, dict):
            yield position, value
        else:
            findings.add_fault(f"Event {position}", f"it is a {type(value).__name__}, not an object")
        at = _after_blanks(text, end)
        if text[at : at + 1] != ",":
            if text[at : at + 1] != "]":
                findings.add_fault(f"Everything after event {position}", "the file ends in the middle of the list")
            return
        at = _after_blanks(text, at + 1)
    findings.add_fault(f"Everything after event {MAX_EVENTS - 1}", f"at most {MAX_EVENTS} events are imported")


def check_fit(event: Event) -> None:
    """Check that the log can hold an event.

    Raises:
        EventUnfit: the event is too large, or nested too deeply.
    """
    wire = event.wire()
    if len(pack(wire)) > SHORTEN_ABOVE_BYTES:  # a smaller event always fits
        to_entry(wire)


def _describe_reason(reason: str | Exception) -> str:
    """Return a readable reason; a schema error names its field."""
    unfit = reason.__cause__ if isinstance(reason, Exception) else None
    if isinstance(unfit, ValidationError):
        found = unfit.errors(include_url=False, include_context=False, include_input=False)
        return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in found[:3])
    return f"there is no {reason}" if isinstance(reason, KeyError) else str(reason)


def _parse_next_value(text: str, at: int) -> tuple[Any, str, int]:
    """Return the value at a position, the reason why it cannot be used, and its end."""
    if len(text) - at > MAX_EVENT_CHARS:  # the rest of the file is short enough to be one event
        end = _find_end_of_value(text, at)
        if end - at > MAX_EVENT_CHARS:
            return None, TOO_LONG, end
    try:
        value, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        return None, "nested too deeply", _find_end_of_value(text, at)
    except ValueError as error:
        return None, str(error), _find_end_of_value(text, at)
    after = _after_blanks(text, end)
    if text[after : after + 1] not in (",", "]", ""):
        return None, f"no comma follows it at character {after}", _find_end_of_value(text, at)
    try:
        return to_plain_json(value), "", end
    except ValueError as error:
        return None, str(error), end


def _find_end_of_value(text: str, at: int) -> int:
    """Return the position of the comma or bracket that ends an unreadable value; else the end of the text."""
    depth = 0
    for mark in _MARK.finditer(text, at):
        match mark.group()[0]:
            case "," if depth == 0:
                return mark.start()
            case "[" | "{":
                depth += 1
            case "]" | "}":
                if depth == 0:
                    return mark.start()
                depth -= 1
    return len(text)


def _after_blanks(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at
