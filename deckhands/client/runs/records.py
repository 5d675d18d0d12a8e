"""The files of a run: `events.jsonl`, one event per line, and `summary.json`.

Holds: events are written as they happen, so a killed run loses at most its last line. Both files can be read without a
server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from broker.contract import Event
from broker.log import parse_exported_event, render_event_line
from broker.runtime import CorruptEntry
from deckhands.client.reading.summary import Summary, summarize


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events_file = path / "events.jsonl"
        self.summary_file = path / "summary.json"

    @property
    def has_events(self) -> bool:
        """Whether a run has written anything here."""
        return self.events_file.exists()

    @property
    def is_over(self) -> bool:
        """Whether the run came to its end, rather than being killed."""
        return self.summary_file.exists()

    @contextmanager
    def recording(self) -> Iterator[EventRecording]:
        """Write the run's events from the first one on, replacing those of an earlier attempt."""
        self.summary_file.unlink(missing_ok=True)
        with self.events_file.open("w", encoding="utf-8") as file:
            yield EventRecording(file)

    def finish(self, summary: Summary) -> None:
        """Write the summary."""
        self.summary_file.write_text(json.dumps(summary.as_json(), indent=2) + "\n", encoding="utf-8")

    def summary(self) -> Summary:
        """Return the summary, computed from the events if the run was killed.

        Raises:
            CorruptEntry: the files are damaged; carries the place.
        """
        if not self.is_over:
            return summarize(self.events())
        try:
            return Summary.from_json(json.loads(self.summary_file.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptEntry(f"{self.summary_file} is not a summary: {error}") from error

    def events(self) -> list[Event]:
        """Read the events, without a last line that was cut off.

        Raises:
            CorruptEntry: a line is damaged; carries its number.
        """
        # Invalid UTF-8 is kept, so that the error can name its line.
        lines = self.events_file.read_text(encoding="utf-8", errors="surrogateescape").split("\n")[:-1]
        if not lines:
            raise CorruptEntry(f"{self.events_file} holds no events.", remedy="Continue the run with --resume.")
        return [_parse_event(line, number, self.events_file) for number, line in enumerate(lines, 1)]


class EventRecording:
    """An open `events.jsonl`."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def add(self, event: Event) -> None:
        """Write the next event through to the kernel."""
        self._file.write(render_event_line(event) + "\n")
        self._file.flush()


def _parse_event(line: str, number: int, file: Path) -> Event:
    try:
        return parse_exported_event(json.loads(line.encode("utf-8", "surrogateescape")))
    except (ValueError, RecursionError, CorruptEntry) as error:
        raise CorruptEntry(f"Line {number} of {file} is not an event: {error}") from error
