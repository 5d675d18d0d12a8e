"""The record of the marked tests: each has a line."""

from __future__ import annotations

import re
from pathlib import Path

from tests.last_runs import FILE, MARKS, read_lines, write_lines
from tests.source_code import ROOT

HERE = Path(__file__).parent
MARKED = re.compile(rf"\bmark\.({'|'.join(MARKS)})\b|\bGROUPS_OF\b")


def test_each_file_with_marked_tests_has_lines() -> None:
    files = {str(path.relative_to(ROOT)) for path in HERE.rglob("test_*.py") if MARKED.search(path.read_text())}
    recorded = {test.partition("::")[0] for test in read_lines()}
    assert files == recorded, "run `make last-runs`"


def test_each_line_names_a_test() -> None:
    gone = []
    for test in read_lines():
        path, _, name = test.partition("::")
        if not re.search(rf"\b{re.escape(name.rpartition('::')[2])}\b", (ROOT / path).read_text()):  # or imported
            gone.append(test)
    assert not gone, "run `make last-runs`"


def test_lines_survive_being_written(tmp_path: Path) -> None:
    write_lines(read_lines(), tmp_path / "again.md")
    assert (tmp_path / "again.md").read_text() == FILE.read_text()
