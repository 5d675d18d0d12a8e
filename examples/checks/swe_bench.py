"""Runs in the workspace of a check, by itself: runs the tests that an instance names, and demands that each passes.

    run.py                       the checker
    run.py --pytest | --django   the tests, in one process with the code under test

Names of tests are pytest's (`tests/test_a.py::test_b`), unittest's as Django's runner prints them
(`test_b (tests.test_a.Case)`), or bare names of functions in the files of the test patch.
Holds: a test counts only if the test framework has reported it as passed in a process that the checker has started;
see `guarded`. Where pytest is not installed, unittest runs its own tests.
Does not: resist code that searches the process of the tests for the token of the report.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import unittest
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from guarded import (  # noqa: E402
    Report,
    confine,
    paths_of_workspace,
    protect,
    report_of,
    run_pytest,
    run_unittest,
    watch,
)

sys.path.pop(0)
LIMIT_SECONDS = 580.0
DJANGO = "django/django"
RIGHT = ("passed", "xfailed")


def main() -> int:
    """Run the tests; return 0 if each of them passes."""
    protect()
    asked: dict[str, Any] = json.loads((HERE / "asked.json").read_text(encoding="utf-8"))
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
    found = _reported("--pytest", files)
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
    return _reported("--django", labels)


def _reported(how: str, names: list[str]) -> dict[str, str]:
    paths = os.pathsep.join(paths_of_workspace()[1:])  # for programs that the tests start
    command = [sys.executable, "-I", str(Path(__file__).resolve()), how]
    return report_of(command, names, LIMIT_SECONDS, **({"PYTHONPATH": paths} if paths else {}))


def run_tests() -> None:
    """Run pytest in this process, or unittest if there is none, and report how each test has ended."""
    report = Report()
    confine()
    try:
        found = run_pytest(report.asked)
    except ImportError:
        print("pytest is not installed: only tests of unittest are run.", flush=True)
        sys.path[:0] = paths_of_workspace()
        modules = [name.removesuffix(".py").replace("/", ".") for name in report.asked]
        found = run_unittest(lambda: [importlib.import_module(name) for name in modules])
    report.send(**found)


def run_django() -> None:
    """Run Django's own runner in this process, and report the tests that unittest counts as passed."""
    report = Report()
    confine()
    found: dict[str, str] = {}
    succeed, expect = unittest.TestResult.addSuccess, unittest.TestResult.addExpectedFailure

    def names_of(test: unittest.TestCase) -> list[str]:
        path = test.id().rpartition(".")[0]
        return [f"{test._testMethodName} ({path})", str(test), *filter(None, [test.shortDescription()])]

    def on_success(result: unittest.TestResult, test: unittest.TestCase) -> None:
        succeed(result, test)
        found.update(dict.fromkeys(names_of(test), "passed"))

    def on_expected(result: unittest.TestResult, test: unittest.TestCase, error: Any) -> None:
        expect(result, test, error)
        found.update(dict.fromkeys(names_of(test), "xfailed"))

    unittest.TestResult.addSuccess, unittest.TestResult.addExpectedFailure = on_success, on_expected  # type: ignore
    owners = (unittest.TestCase, unittest.TestSuite, unittest.TestResult, unittest.case, unittest.case._Outcome)
    unless_replaced = watch(*owners)
    sys.path[:0] = [str(Path("tests").resolve()), *paths_of_workspace()]
    sys.argv = ["tests/runtests.py", "--verbosity", "2", "--settings=test_sqlite", "--parallel", "1", *report.asked]
    try:
        runpy.run_path("tests/runtests.py", run_name="__main__")
    except SystemExit:
        pass
    report.send(**unless_replaced(found))


if __name__ == "__main__":
    runs = {"--pytest": run_tests, "--django": run_django}
    if sys.argv[1:]:
        runs[sys.argv[1]]()
    else:
        sys.exit(main())
