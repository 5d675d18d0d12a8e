"""Runs in the workspace of a check, by itself: runs the tests that an instance names, and demands that each passes.

Names of tests are pytest's (`tests/test_a.py::test_b`), unittest's as Django's runner prints them
(`test_b (tests.test_a.Case)`), or bare names of functions in the files of the test patch.
Holds: a test counts only if pytest itself has reported it as passed, to a file of another interpreter. Where pytest is
not installed, unittest runs its own tests.
Does not: resist code that reads this file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 580.0
DJANGO = "django/django"
RIGHT = ("passed", "xfailed")


def main() -> int:
    """Run the tests; return 0 if each of them passes."""
    asked: dict[str, Any] = json.loads(Path(__file__).with_name("asked.json").read_text(encoding="utf-8"))
    for name in asked["deleted"]:
        Path(name).unlink(missing_ok=True)
    found = _django(asked) if asked["repo"] == DJANGO else _pytest(asked)
    wrong = [name for name in asked["tests"] if found.get(name) not in RIGHT]
    for name in wrong[:50]:
        print(f"{name}: {found.get(name, 'did not run')}")
    print(f"{len(asked['tests']) - len(wrong)} of {len(asked['tests'])} tests pass.")
    return 1 if wrong else 0


def _pytest(asked: dict[str, Any]) -> dict[str, str]:
    names = [_address(name) for name in asked["tests"]]
    files = sorted({name.partition("::")[0] for name in names if "::" in name} | set(asked["files"]))
    files = [name for name in files if Path(name).is_file()]
    paths = [*(place for place in ("src", "lib") if Path(place).is_dir()), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder, "outcomes.json")
        command = [sys.executable, __file__, "--child", str(outcomes), *files]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        try:
            subprocess.run(command, env=environment, timeout=LIMIT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            print(f"The tests took longer than {LIMIT_SECONDS:.0f} seconds.")
        found: dict[str, str] = json.loads(outcomes.read_text(encoding="utf-8")) if outcomes.exists() else {}
    for address, outcome in list(found.items()):
        bare = address.rpartition("::")[2]
        found[bare] = outcome if found.get(bare, outcome) == outcome else "failed"
    return {name: found[_address(name)] for name in asked["tests"] if _address(name) in found}


def _address(name: str) -> str:
    """Return pytest's name of a test that is named as unittest does it."""
    test, has_case, case = name.partition(" (")
    if not has_case or "::" in name:
        return name
    parts = case.rstrip(")").split(".")
    if parts[-1] == test:
        parts.pop()
    return f"{'/'.join(parts[:-1])}.py::{parts[-1]}::{test}"


def _django(asked: dict[str, Any]) -> dict[str, str]:
    labels = sorted({name.removeprefix("tests/").removesuffix(".py").replace("/", ".") for name in asked["files"]})
    command = [sys.executable, "tests/runtests.py", "--verbosity", "2", "--settings=test_sqlite", "--parallel", "1"]
    try:
        done = subprocess.run([*command, *labels], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {}
    written = done.stdout + done.stderr
    print(written[-3000:])
    found: dict[str, str] = {}
    for line in written.splitlines():
        for ending, outcome in ((" ... ok", "passed"), (" ... expected failure", "xfailed")):
            if line.endswith(ending):
                found[line.removesuffix(ending)] = outcome
    return found


class Recorder:
    """What pytest tells its plug-ins."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep how a test has ended."""
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.outcome == "skipped" else report.outcome
        is_worse = report.when != "call" and outcome == "failed"
        if report.when == "call" or is_worse or outcome == "skipped":
            self.outcomes[report.nodeid] = outcome


def _unittest(files: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}

    class Recorded(unittest.TextTestResult):
        def addSuccess(self, test: unittest.TestCase) -> None:
            super().addSuccess(test)
            path, _, method = test.id().rpartition(".")
            module, _, case = path.rpartition(".")
            found[f"{module.replace('.', '/')}.py::{case}::{method}"] = "passed"

    for name in files:
        suite = unittest.defaultTestLoader.loadTestsFromName(name.removesuffix(".py").replace("/", "."))
        unittest.TextTestRunner(resultclass=Recorded).run(suite)
    return found


def run(outcomes: str, files: list[str]) -> None:
    """Run pytest in this interpreter, or unittest if there is none, and write what it has reported."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        import pytest
    except ImportError:
        print("pytest is not installed: only tests of unittest are run.")
        Path(outcomes).write_text(json.dumps(_unittest(files)), encoding="utf-8")
        return
    recorder = Recorder()
    pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", "--tb=short", *files], plugins=[recorder])
    Path(outcomes).write_text(json.dumps(recorder.outcomes), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
