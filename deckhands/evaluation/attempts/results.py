"""The results of attempts: one row each in `results.jsonl`, written as soon as the result is known.

Holds: an attempt has one row, however often its evaluation is interrupted; if it was requeued, the row of the last
round counts. A line cut off by a crash is dropped, and its attempt is examined again. One command at a time writes.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from broker.runtime import UsageError

Outcome = Literal["resolved", "unresolved", "limit", "refused", "setup_failed", "infra-abandoned", "not-run"]
OUTCOMES: Sequence[Outcome] = get_args(Outcome)
SAYS_NOTHING = frozenset({"setup_failed", "infra-abandoned", "not-run"})
"""Outcomes that do not say anything about the agent."""


CHECK_FAILED, CRITIC_FAILED = "check_", "critic_"
"""The prefixes of the codes of failed checks and critics."""


class ResultsInUse(UsageError):
    """Another command is running the evaluation."""


class AttemptRow(BaseModel):
    """The result of one attempt.

    Attributes:
        cause: the reason as a code: the reached limit or the error; empty if a score decided.
        evidence: the output of the check, the given answer, or the error; shortened.
        tries: the number of starts; more than one after failures of the infrastructure.
        failures: the codes of these failures.
        round: how often the attempt was requeued.
        seconds: from the first event of its conversation to the last: `working_seconds` and all `waiting_seconds`.
        working_seconds: the time in model calls and tools.
        waiting_seconds: by reason, such as `worker`, `rate_limit` or `paused`; see `times`.
        scoring_seconds: the duration of the check.
        left_out: files that the agent changed but that do not count.
        checked_id: the conversation of the check; `critic_id`: that of the critic.
        reward: the number from the check or a scorer; None if there is only the outcome.
        metrics: further numbers of the check and scorers, by name.
        step_rewards: one for each step of the agent; empty for none.
        score: the critic's score, from 0 to 10; None without a critic. `verdict` is its reason.
        cost_usd: of its last try, without the check and the critic.
        critic_cost_usd: the cost of the critic; `lost_cost_usd` is the cost of earlier tries that failed in the
            infrastructure.
        prompt_tokens, completion_tokens: of its last try, with its delegates.
        critic_tokens: the tokens of the critic; `lost_tokens` are those of tries that failed or were cancelled.
        has_unknown_cost: the price of some calls is unknown, so the true cost is higher.
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
    critic_id: str = ""
    round: int = 0
    tries: int = 1
    failures: list[str] = []
    iterations: int = 0
    cost_usd: float = 0.0
    has_unknown_cost: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    working_seconds: float = 0.0
    waiting_seconds: dict[str, float] = {}
    scoring_seconds: float = 0.0
    tags: list[str] = []
    left_out: list[str] = []
    patch: str = ""
    reward: float | None = None
    metrics: dict[str, float] = {}
    step_rewards: list[float] = []
    score: float | None = None
    verdict: str = ""
    critic_cost_usd: float = 0.0
    lost_cost_usd: float = 0.0
    critic_tokens: int = 0
    lost_tokens: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        """The attempt of this result."""
        return self.model, self.instance, self.attempt

    @property
    def counts(self) -> bool:
        """Whether the result counts for the agent's score."""
        return self.outcome not in SAYS_NOTHING

    @property
    def spent_usd(self) -> float:
        """Its total cost."""
        return self.cost_usd + self.critic_cost_usd + self.lost_cost_usd

    @property
    def spent_tokens(self) -> int:
        """All of its tokens."""
        return self.prompt_tokens + self.completion_tokens + self.critic_tokens + self.lost_tokens

    def is_same_run(self, other: AttemptRow) -> bool:
        """Return whether both are results of one run of an attempt, which was requeued but did not start again."""
        return bool(self.conversation_id) and self.conversation_id == other.conversation_id

    @property
    def conversations(self) -> int:
        """The number of its conversations, including those of checks and critics."""
        if not self.conversation_id and not self.failures:
            return 0
        others = sum(code.startswith((CHECK_FAILED, CRITIC_FAILED)) for code in self.failures)
        return self.tries + others + bool(self.checked_id) + bool(self.critic_id)


class Results:
    """The rows of an evaluation, in its directory.

    Attributes:
        rows: one for each attempt, by its key.
        replaced_cost_usd, replaced_tokens: of runs whose rows were replaced by those of later rounds.
    """

    def __init__(self, path: Path) -> None:
        """Read the existing rows.

        Raises:
            BeingWritten: another command is writing.
            UsageError: the file cannot be used.
        """
        self.path = path
        self.rows: dict[tuple[str, str, int], AttemptRow] = {}
        self.replaced_cost_usd = 0.0
        self.replaced_tokens = 0
        try:
            self._file = path.open("ab", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ResultsInUse(
                f"Another command runs the evaluation in {path.parent}.",
                remedy="`deckhands eval attach` follows it; `deckhands eval retune` and others steer it.",
            ) from error
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
        try:
            self._read()
        except UsageError:
            self._file.close()
            raise

    def _read(self) -> None:
        path, size = self.path, 0
        for line in _whole_lines(path):
            try:
                row = AttemptRow.model_validate_json(line)
            except ValidationError as error:
                raise UsageError(
                    f"{path} has a line that is not a result: {line[:80]!r}.",
                    remedy="Name another directory with --out.",
                ) from error
            self._keep(row)
            size += len(line) + 1
        try:
            self._file.truncate(size)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, row: AttemptRow) -> None:
        """Write a row to the disk. Raises the errors of `add_all`."""
        self.add_all([row])

    def add_all(self, rows: Iterable[AttemptRow]) -> None:
        """Write several rows at once.

        Raises:
            UsageError: they cannot be written; none of them is.
        """
        rows = list(rows)
        rest = memoryview(b"".join(row.model_dump_json().encode() + b"\n" for row in rows))
        descriptor = self._file.fileno()
        before = os.fstat(descriptor).st_size
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(descriptor, before)
            raise UsageError(
                f"{self.path} cannot be written: {error.strerror}.",
                remedy="Free space on the disk; then `deckhands eval attach` continues.",
            ) from error
        for row in rows:
            self._keep(row)

    def _keep(self, row: AttemptRow) -> None:
        known = self.rows.get(row.key)
        _keep_whole_lines(self.rows, row)
        if known is not None and self.rows[row.key] is row and not known.is_same_run(row):
            self.replaced_cost_usd += known.spent_usd
            self.replaced_tokens += known.spent_tokens


def read_results(path: Path) -> list[AttemptRow]:
    """Return the rows of a file, one for each attempt.

    Raises:
        UsageError: the file cannot be read, or a line is not a row.
    """
    if not path.is_file():
        raise UsageError(
            f"There is no {path}: no attempt has ended there.",
            remedy="Name the directory of an evaluation, or start with `deckhands eval run` or `eval attach`.",
        )
    rows: dict[tuple[str, str, int], AttemptRow] = {}
    try:
        for line in _whole_lines(path):
            _keep_whole_lines(rows, AttemptRow.model_validate_json(line))
        return list(rows.values())
    except ValidationError as error:
        raise UsageError(f"{path} has a line that is not a result.") from error


def _keep_whole_lines(rows: dict[tuple[str, str, int], AttemptRow], row: AttemptRow) -> None:
    known = rows.get(row.key)
    if known is None or row.round > known.round:
        rows[row.key] = row


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
