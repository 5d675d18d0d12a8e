"""The record of the marked tests: each has a line, and a run writes it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.last_runs import FILE, MARKS, NEVER, Line, read_lines, write_lines
from tests.source_code import ROOT

HERE = Path(__file__).parent
MARKED = re.compile(rf"\bmark\.({'|'.join(MARKS)})\b|\bGROUPS_OF\b")
SUITE = """
import pytest

@pytest.mark.parametrize("case", [1, pytest.param(2, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.slow)])
def test_cases(case):
    assert case != 3

@pytest.mark.docker
def test_engine():
    pytest.skip("none")

def test_plain():
    pass
"""


def test_each_file_with_marked_tests_has_lines() -> None:
    files = {str(path.relative_to(ROOT)) for path in HERE.rglob("test_*.py") if MARKED.search(path.read_text())}
    recorded = {test.partition("::")[0] for test in read_lines()}
    assert files - {"tests/test_last_runs.py"} == recorded, "run `make last-runs`"


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


def test_run_writes_its_marked_tests_and_leaves_the_others(tmp_path: Path) -> None:
    """In a copy, with the workers of xdist: only their reports reach the process that writes."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_suite.py").write_text(SUITE)
    shutil.copy(HERE / "last_runs.py", tests)
    (tests / "conftest.py").write_text(
        "from tests.last_runs import LastRuns\n"
        "def pytest_configure(config):\n"
        "    if not hasattr(config, 'workerinput'):\n"
        "        config.pluginmanager.register(LastRuns())\n"
    )
    (tests / "__init__.py").touch()
    other = {"tests/test_other.py::test_other": Line("slow", "2026-01-01", "1 passed")}
    write_lines(other, tests / "LAST_RUNS.md")

    def run(*arguments: str) -> dict[str, Line]:
        options = ["-q", "-p", "no:cacheprovider", "--strict-markers", "-c", str(tmp_path / "pytest.ini"), *arguments]
        subprocess.run([sys.executable, "-m", "pytest", *options], cwd=tmp_path, capture_output=True, check=False)
        return read_lines(tests / "LAST_RUNS.md")

    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    soak\n    docker\n    claude\n")
    cases, engine = "tests/test_suite.py::test_cases", "tests/test_suite.py::test_engine"
    found = run("-n", "1")
    assert {test: (line.marks, line.result) for test, line in found.items()} == {
        **{test: (line.marks, line.result) for test, line in other.items()},
        cases: ("slow, soak", "1 failed, 1 passed"),
        engine: ("docker", "1 skipped"),
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found[cases].day)
    write_lines(other, tests / "LAST_RUNS.md")
    collected = run("--collect-only")
    assert collected == {cases: Line("slow, soak", NEVER, ""), engine: Line("docker", NEVER, "")}
