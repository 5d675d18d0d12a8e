"""The results file: one JSON object per line, appended as each task settles.

Holds: each result is stored once and whole. A line that was cut off by a kill is dropped when the file is opened again,
and one process writes at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broker.runtime import DeckhandsError, UsageError
from deckhands.client.reading.summary import ExitCode, Summary

LINE_PREFIX = b'{"id": '
READ_BYTES = 2**16
MAX_LINE_BYTES = 2**26


class NotWritten(DeckhandsError):
    """A result could not be written."""

    code = "not_written"


class ResultsFile:
    """An open results file.

    Attributes:
        done: the state and the exit code of each conversation that has a result.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.done: dict[str, tuple[str, ExitCode]] = {}
        self._path = path
        self._descriptor = descriptor
        self._read()

    def add(self, line_id: str, conversation_id: str, summary: Summary) -> None:
        """Write a result, unless it is stored already. Idempotent.

        Raises:
            NotWritten: it could not be written; see `result_of` for the content of a line.
        """
        if conversation_id in self.done:
            return
        line = json.dumps({"id": line_id, **render_result(conversation_id, summary)}).encode() + b"\n"
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            raise NotWritten(
                f"The file {self._path} cannot be written: {error.strerror}.", remedy="Make room, and repeat this."
            ) from error
        self.done[conversation_id] = (summary.state, summary.exit_code)

    def sync(self) -> None:
        """Flush to disk, so that a power failure loses nothing."""
        os.fsync(self._descriptor)

    def _read(self) -> None:
        """Read the existing results, and drop a line that was cut off."""
        end = number = 0
        with os.fdopen(os.dup(self._descriptor), "rb", buffering=READ_BYTES) as file:
            file.seek(0)
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                is_whole = line.endswith(b"\n")
                try:
                    fields = json.loads(line)
                    summary = Summary.from_json(fields["summary"])
                    self.done[str(fields["conversation_id"])] = (summary.state, summary.exit_code)
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                    if is_whole or not (line.startswith(LINE_PREFIX) or LINE_PREFIX.startswith(line)):
                        raise UsageError(
                            f"Line {number} of {self._path} is not a result.",
                            remedy="Name another file with --results.",
                        ) from None
                    os.ftruncate(self._descriptor, end)
                    return
                end += len(line)
                if not is_whole:  # complete except for its line end
                    os.write(self._descriptor, b"\n")


def render_result(conversation_id: str, summary: Summary) -> dict[str, Any]:
    """Return the fields of a result beside the task's id: the conversation and the fields of `show --json`."""
    return {"conversation_id": conversation_id, "summary": summary.as_json()}


@contextmanager
def open_results(path: Path) -> Iterator[ResultsFile]:
    """Open a results file, and create it if needed.

    Raises:
        UsageError: it cannot be used, contains something else, or another process writes it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"The file {path} cannot be written: {why}.", remedy="Name another with --results.") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = ResultsFile(path, descriptor)
        except OSError as error:
            why = "another process writes it" if isinstance(error, BlockingIOError) else error.strerror
            raise UsageError(
                f"The file {path} cannot be used: {why}.", remedy="Name another with --results."
            ) from error
        yield found
        found.sync()
    finally:
        os.close(descriptor)
