"""The results of attempts: a row for each in `results.jsonl`, written when it is known, and read again later.

Holds: an attempt has one row, however often its evaluation is interrupted; a line that was cut off by a death is
dropped, and its attempt is looked at again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from broker.runtime.errors import UsageError

Outcome = Literal["resolved", "unresolved", "limit", "refused", "infra-abandoned"]
OUTCOMES: Sequence[Outcome] = ("resolved", "unresolved", "limit", "refused", "infra-abandoned")


class Row(BaseModel):
    """The result of one attempt.

    Attributes:
        cause: why, as a code: the limit that was reached, the code of the error; empty for what a score decides.
        evidence: what the check wrote, the answer that was given, or the error; cut.
        tries: how often it was begun; more than once after failures of the infrastructure.
        failures: the codes of these failures.
        seconds: from the first event of its conversation to the last.
        scoring_seconds: the same of the check.
        left_out: files that the agent changed and that do not count.
        checked_id: the conversation in which the check ran.
    """

    model_config = ConfigDict(extra="ignore")

    instance: str
    model: str
    attempt: int
    outcome: Outcome
    cause: str = ""
    evidence: str = ""
    conversation_id: str = ""
    checked_id: str = ""
    tries: int = 1
    failures: list[str] = []
    iterations: int = 0
    cost_usd: float = 0.0
    has_unknown_cost: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    scoring_seconds: float = 0.0
    tags: list[str] = []
    left_out: list[str] = []
    patch: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """Which attempt it is the result of."""
        return self.model, self.instance, self.attempt

    @property
    def counts(self) -> bool:
        """Whether it says something about the agent."""
        return self.outcome != "infra-abandoned"


class Results:
    """The rows of an evaluation, in its directory."""

    def __init__(self, path: Path) -> None:
        """Read what is there.

        Raises:
            UsageError: the file cannot be used.
        """
        self.path = path
        self.rows: dict[tuple[str, str, int], Row] = {}
        size = 0
        for line in _whole_lines(path):
            try:
                row = Row.model_validate_json(line)
            except ValidationError as error:
                raise UsageError(
                    f"{path} has a line that is no result: {line[:80]!r}.", remedy="Name another directory with --out."
                ) from error
            self.rows.setdefault(row.key, row)
            size += len(line) + 1
        try:
            self._file = path.open("ab")
            self._file.truncate(size)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, row: Row) -> None:
        """Write a row, so that it is on the disk when this returns."""
        self._file.write(row.model_dump_json().encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows[row.key] = row


def read_results(path: Path) -> list[Row]:
    """Return the rows of a file.

    Raises:
        UsageError: it cannot be read, or has a line that is no row.
    """
    if not path.is_file():
        raise UsageError(f"There is no {path}.", remedy="Name the directory of an evaluation.")
    try:
        return [Row.model_validate_json(line) for line in _whole_lines(path)]
    except ValidationError as error:
        raise UsageError(f"{path} has a line that is no result.") from error


def _whole_lines(path: Path) -> Iterator[bytes]:
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    *whole, last = content.split(b"\n")
    for number, line in enumerate(whole):
        if number == len(whole) - 1 and not last and not _is_json(line):
            return  # cut off, and a later writer has ended the line
        yield line


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
