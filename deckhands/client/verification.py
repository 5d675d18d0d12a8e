"""Verify logs: live, archived, or exported to a file.

Holds: a file is untrusted input; its size, its lines and its nesting are bounded, and no value of it is evaluated.
Does not: judge a log; `broker.log.specification` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from broker.contract import DelegateEnded, Event
from broker.log import ConversationRow, LogViolation, check_log
from broker.runtime import UsageError, format_count
from broker.store import parse_number

MAX_FILE_BYTES = 256 << 20
MAX_LINE_BYTES = 32 << 20
"""An event has at most 16 MiB; JSON escapes what is not ASCII."""
MAX_NESTING = 200
SUMMARY = "summary"


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of checking a log.

    Attributes:
        source: the conversation's id, or the path of a file.
        events: the number of events.
        violations: the first 100 violations, in the order of the log.
    """

    source: str
    events: int
    violations: tuple[LogViolation, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the log is correct."""
        return not self.violations

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        violations = [asdict(violation) for violation in self.violations]
        return {"source": self.source, "holds": self.holds, "events": self.events, "violations": violations}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return it from the values of `as_json`."""
        found = tuple(LogViolation(**violation) for violation in fields["violations"])
        return cls(fields["source"], fields["events"], found)


def verify_log(
    source: str, events: Sequence[Event], *, conversation_id: str | None = None, row: ConversationRow | None = None
) -> Verification:
    """Check a log.

    Args:
        conversation_id: the expected conversation; None for the one in the first event.
        row: its row in the index, read while the log did not grow.
    """
    wires = [event.export() for event in events]
    index: dict[str, Any] = {}
    if row is not None:
        index = {"last_event_id": row.last_event_id}
        # Until its owner has read the end of a delegate, the index does not count it.
        if events and not isinstance(events[-1], DelegateEnded) and "iterations" in row.fields:
            index |= {
                "state": row.state,
                "iterations": parse_number(row.fields["iterations"]),
                "cost_usd": row.cost_usd,
            }
    return Verification(source, len(events), tuple(check_log(wires, conversation_id=conversation_id, index=index)))


def verify_file(path: Path) -> Verification:
    """Check the log in a file: one JSON object per line, as `deckhands export` and `run --json` write it.

    Raises:
        UsageError: the file cannot be read or is not a log; the text names the line.
    """
    events = read_log_file(path)
    return Verification(str(path), len(events), tuple(check_log(events)))


def read_log_file(path: Path) -> list[Any]:
    """Return the events of a file. The summary of `run --json` is left out.

    Raises:
        UsageError: the file cannot be read, is too large, or has a line that is not a JSON object.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise UsageError(f"{path} is not a file.", remedy="Name a file that `deckhands export` wrote.")
        if size > MAX_FILE_BYTES:
            raise UsageError(
                f"{path} has {size:,} bytes; the limit is {MAX_FILE_BYTES:,}.",
                remedy="Name the log of one conversation.",
            )
        with path.open("rb") as file:
            return _parse_lines(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", remedy="Name another.") from error


def _parse_lines(lines: Iterable[bytes], path: Path) -> list[Any]:
    events: list[Any] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"it has more than {MAX_LINE_BYTES:,} bytes")  # noqa: TRY301  (one form for all)
            event = json.loads(line.decode(), parse_constant=_refuse_constant)
            if not isinstance(event, dict):
                raise ValueError(f"it is a JSON {type(event).__name__}, not an object")  # noqa: TRY301, TRY004
            _check_nesting(event)
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
            raise UsageError(
                f"Line {number:,} of {path} is not an event: {why}.",
                remedy="A log has one JSON object per line, as `deckhands export ID` writes it.",
            ) from error
        if event.get(SUMMARY) is not True:
            events.append(event)
            if event.get("id") != len(events):
                break  # the check ends with the first event out of order, so a file of any size costs little
    if not events:
        raise UsageError(f"{path} holds no events.", remedy="Name a file that `deckhands export` wrote.")
    return events


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _check_nesting(event: Any) -> None:
    level = [event]
    for _ in range(MAX_NESTING):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {format_count(MAX_NESTING, 'level')} deep")
