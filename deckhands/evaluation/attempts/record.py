"""The record of an evaluation for programs: `progress.jsonl` in its directory, one JSON object per line.

    {"kind": "status", "at": "…", "state": "running", "ended": 12, "in_flight": 8, "bound": "-n 8", …}
    {"kind": "attempt", "at": "…", "instance": "…", "state": "works", "cause": "", "conversation_id": "…", …}
    {"kind": "ended", "at": "…", "instance": "…", "model": "…", "attempt": 1, "outcome": "resolved", …}

Holds: append-only; a driver that continues appends to the same file, after its last whole line.
Does not: decide anything; results are in `results.jsonl`.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from broker.runtime import SYSTEM_CLOCK, UsageError
from deckhands.evaluation.attempts.results import AttemptRow
from deckhands.evaluation.attempts.status import EvaluationStatus

PROGRESS = "progress.jsonl"
EVERY_SECONDS = 5.0
MAX_LINE_BYTES = 2**24
LEFT_OUT = {"evidence", "patch", "step_rewards"}


class ProgressRecord:
    """Appends to the record."""

    def __init__(self, directory: Path) -> None:
        """Open the file.

        Raises:
            UsageError: it cannot be written.
        """
        path = directory / PROGRESS
        try:
            _cut_off(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
        self._written_at = float("-inf")
        self._state: tuple[str, ...] = ()
        self._attempts: dict[tuple[str, str, int], tuple[str, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with suppress(OSError):  # the write error was reported already
            self._file.close()

    def add_row(self, row: AttemptRow) -> None:
        """Add a finished attempt; `results.jsonl` has its evidence and patch."""
        self._add("ended", row.model_dump(mode="json", exclude=LEFT_OUT))

    def add_status(self, status: EvaluationStatus) -> None:
        """Add the progress, every five seconds and whenever another limit binds.

        An attempt in flight is added when its conversation, or the cause of its delay, changes.
        """
        known, self._attempts = self._attempts, {}
        for one in status.attempts:
            key, news = (one.model, one.instance, one.attempt), (one.conversation_id, one.cause)
            self._attempts[key] = news
            if one.conversation_id and known.get(key) != news:
                self._add("attempt", asdict(one))
        now, state = SYSTEM_CLOCK.monotonic(), (status.state, status.bound, status.warning)
        if now - self._written_at < EVERY_SECONDS and state == self._state:
            return
        self._written_at = now
        self._state = state
        self._add("status", {name: value for name, value in status.as_json().items() if name != "attempts"})

    def _add(self, kind: str, fields: dict[str, Any]) -> None:
        line = {"kind": kind, "at": SYSTEM_CLOCK.now().isoformat(timespec="milliseconds")} | fields
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise UsageError(
                f"{self._file.name} cannot be written: {error.strerror}.",
                remedy="Free space on the disk; then `deckhands eval attach` continues.",
            ) from error


def _cut_off(path: Path) -> None:
    """Remove an incomplete last line."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        start = max(0, end - MAX_LINE_BYTES)
        file.seek(start)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(start + whole if whole or not start else end)
