"""A task file: one task per line, as JSON Lines or as CSV.

Holds: one line at a time is in memory, plus the id of each. All lines are checked before any task is submitted.
An error names the number of the line.
Does not: fill in missing fields; `Complete` does.
"""

from __future__ import annotations

import csv
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Literal

from broker.runtime import UsageError
from deckhands.client.tasks.spec import TaskSpec
from deckhands.client.tasks.tasks import derive_conversation_id

MAX_LINE_BYTES = 2**20
MAX_LINES = 1_000_000
MAX_ID_CHARS = 200
SHOWN_LINES = 20
JSON_COLUMNS = frozenset({"tools", "output", "images", "headless", "limits", "labels", "secrets"})
"""Columns of CSV that hold JSON."""
SPLIT_COLUMNS = frozenset({"limits", "labels", "secrets"})
"""Columns that may be split into one column per part: `labels.team`."""

Form = Literal["jsonl", "csv"]
Complete = Callable[[TaskSpec], TaskSpec]
"""Fills in the command line's values for missing fields, and raises `UsageError` for an invalid task."""


@dataclass(frozen=True, slots=True)
class TaskLine:
    """One task of a file.

    Attributes:
        line_id: the producer's own id.
        key: the idempotency key; the same for the same id of the same batch.
    """

    number: int
    line_id: str
    key: str
    request: TaskSpec

    @property
    def conversation_id(self) -> str:
        """The id of its conversation."""
        return derive_conversation_id(self.key)


class BadLines(UsageError):
    """Lines of a file that cannot be used.

    Attributes:
        lines: the number and the error of each, for the first twenty of them.
        count: how many there are.
    """

    code = "bad_lines"

    def __init__(self, lines: list[tuple[int, str]], count: int) -> None:
        listed = "".join(f"\n    line {number}: {why}" for number, why in lines)
        more = f"\n    … and {count - len(lines):,} more" if count > len(lines) else ""
        what = "1 line cannot be used" if count == 1 else f"{count:,} lines cannot be used"
        super().__init__(f"{what}, so nothing was submitted:{listed}{more}", remedy="Correct the file.")
        self.lines = lines
        self.count = count


class TaskFile:
    """An open task file, which can be read again.

    Args:
        batch: the prefix of the idempotency keys.
        complete: see `Complete`.
    """

    def __init__(self, file: IO[bytes], form: Form, batch: str, complete: Complete) -> None:
        self._file = file
        self._form = form
        self._batch = batch
        self._complete = complete

    def check(self) -> int:
        """Read all lines and return how many there are.

        Raises:
            BadLines: some cannot be used.
            UsageError: there are too many lines.
        """
        bad: list[tuple[int, str]] = []
        count = number_bad = 0
        seen: dict[str, int] = {}
        for number, found in self._read():
            count += 1
            if count > MAX_LINES:
                raise UsageError(f"The file has more than {MAX_LINES:,} tasks.", remedy="Split it.")
            why = str(found) if isinstance(found, UsageError) else ""
            if isinstance(found, TaskLine) and seen.setdefault(found.line_id, number) != number:
                why = f"the id {found.line_id!a} is that of line {seen[found.line_id]}."
            if why:
                number_bad += 1
                if len(bad) < SHOWN_LINES:
                    bad.append((number, why))
        if number_bad:
            raise BadLines(bad, number_bad)
        return count

    def lines(self) -> Iterator[TaskLine]:
        """Yield the tasks, in order.

        Raises:
            BadLines: a line is invalid, because the file has changed since `check`.
        """
        for number, found in self._read():
            if isinstance(found, UsageError):
                raise BadLines([(number, str(found))], 1)
            yield found

    def _read(self) -> Iterator[tuple[int, TaskLine | UsageError]]:
        self._file.seek(0)
        for number, fields in _parse_csv(self._file) if self._form == "csv" else _parse_json_lines(self._file):
            try:
                if isinstance(fields, UsageError):
                    raise fields
                yield number, self._line(number, dict(fields))
            except UsageError as error:
                yield number, error

    def _line(self, number: int, fields: dict[str, Any]) -> TaskLine:
        line_id = fields.pop("id", None)
        if isinstance(line_id, int) and not isinstance(line_id, bool):
            line_id = str(line_id)
        if not isinstance(line_id, str) or not 1 <= len(line_id) <= MAX_ID_CHARS:
            raise UsageError(f"it has no id, a text of 1 to {MAX_ID_CHARS} characters.")
        if "idempotency_key" in fields:
            raise UsageError("idempotency_key: the id of the line is the key.")
        request = self._complete(TaskSpec.parse(fields))
        digest = sha256(f"{self._batch}\0{line_id}".encode("utf-8", "surrogatepass")).hexdigest()
        return TaskLine(number, line_id, f"file:{digest}", request)


@contextmanager
def open_task_file(
    name: str, standard_input: Callable[[], IO[bytes]], *, form: Form | None, batch: str | None, complete: Complete
) -> Iterator[TaskFile]:
    """Open a file of tasks.

    Args:
        name: its path, or `-` for standard input, which is copied to a temporary file first.
        form: the format; None for CSV if the file's name ends so, else JSON Lines.
        batch: the name of the batch; None for the file's absolute path.

    Raises:
        UsageError: the file cannot be read, or standard input is read without a batch.
    """
    if name == "-":
        if batch is None:
            raise UsageError(
                "Standard input has no name.", remedy="Name the batch with --batch; a repetition needs it."
            )
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(standard_input(), copy)
            yield TaskFile(copy, form or "jsonl", batch, complete)
        return
    path = Path(name)
    try:
        file = path.open("rb")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"The file {ascii(name)[1:-1]} cannot be read: {why}.", remedy="Name another.") from error
    with file:
        if not file.seekable():
            raise UsageError(f"The file {ascii(name)[1:-1]} can be read only once.", remedy="Pass it as --from -.")
        found = form or ("csv" if path.suffix.lower() == ".csv" else "jsonl")
        yield TaskFile(file, found, batch or str(path.resolve()), complete)


def _parse_json_lines(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any] | UsageError]]:
    for number, line in _read_lines(file):
        if isinstance(line, UsageError):
            yield number, line
        elif line.strip():
            yield number, _parse_object(line)


def _parse_object(line: str) -> dict[str, Any] | UsageError:
    try:
        found = json.loads(line)
    except RecursionError:
        return UsageError("it is nested too deeply.")
    except ValueError as error:
        return UsageError(f"it is not JSON: {ascii(str(error))[1:-1][:200]}.")
    return found if isinstance(found, dict) else UsageError("it is not a JSON object.")


def _parse_csv(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any] | UsageError]]:
    broken: list[UsageError] = []

    def texts() -> Iterator[str]:
        for _, line in _read_lines(file):
            if isinstance(line, UsageError):
                broken.append(line)
                yield "\n"
            else:
                yield line

    reader = csv.reader(texts(), strict=True)
    head: list[str] | None = None
    try:
        for cells in reader:
            if broken:
                yield reader.line_num, broken.pop()
            elif not cells:
                continue
            elif head is None:
                head = ["task" if cell.strip() == "prompt" else cell.strip() for cell in cells]
                if len(set(head)) < len(head):
                    yield reader.line_num, UsageError("the header names a column twice.")
                    return
            else:
                yield reader.line_num, _parse_row(head, cells)
    except csv.Error as error:  # the following lines cannot be told apart
        yield reader.line_num, UsageError(f"it is not CSV: {error}.")


def _parse_row(head: list[str], cells: list[str]) -> dict[str, Any] | UsageError:
    if len(cells) != len(head):
        return UsageError(f"it has {len(cells)} cells; the header has {len(head)}.")
    found: dict[str, Any] = {}
    for name, cell in zip(head, cells, strict=True):
        if not cell:
            continue
        whole, dot, part = name.partition(".")
        is_json = whole in JSON_COLUMNS and not (dot and whole != "limits")
        try:
            value = json.loads(cell) if is_json or (name in ("agent", "workspace") and cell[0] == "{") else cell
        except (ValueError, RecursionError):
            what = "a number" if whole == "limits" and dot else "JSON"
            return UsageError(f"{ascii(name)[1:-1][:100]}: it is not {what}.")
        if dot and whole in SPLIT_COLUMNS:
            parts = found.setdefault(whole, {})
            if not isinstance(parts, dict):
                return UsageError(f"{whole}: it is given both whole and in parts.")
            parts[part] = value
        elif name in found:
            return UsageError(f"{ascii(name)[1:-1][:100]}: it is given both whole and in parts.")
        else:
            found[name] = value
    return found


def _read_lines(file: IO[bytes]) -> Iterator[tuple[int, str | UsageError]]:
    """Yield the lines with their numbers; a line that is too long is yielded as its number only."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
            yield number, UsageError("it has more than 1 MiB.")
            continue
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            yield number, UsageError("it is not text in UTF-8.")
