"""The record of the tests that `make test` leaves out: `tests/LAST_RUNS.md` says when each ran last, and how it ended.

The targets that run them pass `--record-runs`. With `--collect-only` too, nothing runs: tests without a line get one that
says "never", and lines of tests that are gone go (`make last-runs`).

Holds: a line is written by a run of its test, and by nothing else; a run that was ended early writes those it finished.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

MARKS = ("slow", "soak", "docker", "claude")
FILE = Path(__file__).with_name("LAST_RUNS.md")
NEVER = "never"
HEAD = """\
# Last runs of the marked tests

`make test` and `make end-to-end` leave out the tests marked slow, soak and claude, and those marked docker where no
engine answers. `make faults`, `make orphans`, `make security`, `make soak`, `make claude` and `make test-docker` run them
and write their lines here; `make last-runs` adds the lines of new tests. The result counts a test's marked cases.

| test | marks | last run | result |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Line:
    """What is known of one test function."""

    marks: str
    day: str = NEVER
    result: str = ""


def read_lines(path: Path = FILE) -> dict[str, Line]:
    """Return the lines by test."""
    rows = (line.strip("|\n ").split(" | ") for line in path.read_text().splitlines() if line.startswith("| tests/"))
    return {row[0]: Line(*(cell.strip() for cell in row[1:])) for row in rows}


def write_lines(lines: dict[str, Line], path: Path = FILE) -> None:
    rows = [f"| {test} | {line.marks} | {line.day} | {line.result} |\n" for test, line in sorted(lines.items())]
    path.write_text(HEAD + "".join(rows))


def function_of(node_id: str) -> str:
    return node_id.partition("[")[0]


def join_marks(names: Iterable[str]) -> str:
    found = set(names)
    return ", ".join(mark for mark in MARKS if mark in found)


class LastRuns:
    """Collects the outcomes of marked tests, and writes them at the end of the run."""

    def __init__(self, path: Path = FILE) -> None:
        self.path = path
        self.marks: defaultdict[str, set[str]] = defaultdict(set)
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            for item in session.items:
                self.marks[function_of(item.nodeid)] |= set(MARKS) & {mark.name for mark in item.iter_markers()}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (marks := set(MARKS) & set(report.keywords)) and (report.when == "call" or not report.passed):
            self.marks[function_of(report.nodeid)] |= marks
            self.outcomes[function_of(report.nodeid)][report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        known = read_lines(self.path) if self.path.exists() else {}
        if session.config.option.collectonly:
            marked = {test: join_marks(marks) for test, marks in self.marks.items() if marks}
            lines = {test: Line(marks, *_rest(known.get(test))) for test, marks in marked.items()}
        else:
            day = f"{datetime.now(UTC):%Y-%m-%d}"
            lines = known | {
                test: Line(
                    join_marks(self.marks[test]), day, ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
                )
                for test, counts in self.outcomes.items()
            }
        write_lines(lines, self.path)


def _rest(line: Line | None) -> tuple[str, str]:
    return (line.day, line.result) if line else (NEVER, "")
