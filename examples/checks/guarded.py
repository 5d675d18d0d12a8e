"""Runs a part of a check in a separate process and returns its report. The other programs of checks import it.

Holds: exit codes, printed text and files decide nothing: a report comes over a pipe, after a token that its process has
read before any code under test runs. What the process starts can neither trace nor signal the checker, nor write
outside the workspace and temporary files, where the kernel has Landlock. In one process with the code under test, these
functions use builtins and modules as they were before it ran, and no module that it can import leads to them.
Does not: keep code under test from searching its process for the token, or for the objects that decide.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import json
import os
import secrets
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from json.encoder import encode_basestring_ascii
from types import ModuleType
from typing import Any

__builtins__ = dict(vars(builtins))
"""A copy, which every function below uses: code under test can replace functions of the module only."""

TOKEN_BYTES = 32
REPORT_LIMIT_BYTES = 16 * 2**20
REPORT_FD = "DECKHANDS_REPORT_FD"
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_WRITES = 0x1FF2 | 1 << 13  # write, remove, make and move
_LANDLOCK_SCOPES = 3  # abstract sockets and signals


def protect() -> None:
    """Make this process untraceable for programs without privileges."""
    try:
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    except (OSError, AttributeError):  # no Linux
        pass


def confine() -> bool:
    """Let this process and its children write only to the workspace and temporary files; trace and signal only itself.

    Returns:
        Whether the kernel offers that.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
        version = call(_LANDLOCK_CREATE, None, 0, 1)
        if version < 2:
            return False
        ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
        scopes = _LANDLOCK_SCOPES if version >= 6 else 0
        rules = struct.pack("=QQQ", _LANDLOCK_WRITES, 0, scopes)[: 24 if version >= 6 else 8]
        ruleset = call(_LANDLOCK_CREATE, rules, len(rules), 0)
        for directory in {os.getcwd(), tempfile.gettempdir(), "/tmp", "/dev"}:
            try:
                opened = os.open(directory, os.O_PATH | os.O_DIRECTORY)
            except OSError:
                continue
            call(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", _LANDLOCK_WRITES, opened), 0)
            os.close(opened)
        is_confined = ruleset >= 0 and call(_LANDLOCK_RESTRICT, ruleset, 0) == 0
        os.close(ruleset)
    except (OSError, AttributeError):
        return False
    return is_confined


# The report of a process


def report_of(command: list[str], asked: Any, limit_seconds: float, **variables: str) -> dict[str, Any]:
    """Run a command and return what it reports; empty: nothing that counts.

    What it printed does not count, and neither does its exit code. Its group of processes is killed at the end.

    Args:
        asked: what the process gets from its `Report`.
        variables: of its environment, besides ours.
    """
    token = secrets.token_hex(TOKEN_BYTES)
    reading, writing = os.pipe()
    environment = {**os.environ, **variables, REPORT_FD: str(writing)}
    received = b""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, pass_fds=(writing,), env=environment, start_new_session=True
    ) as process:
        os.close(writing)
        try:
            assert process.stdin is not None
            try:
                with process.stdin:
                    process.stdin.write(token.encode() + json.dumps(asked).encode())
            except BrokenPipeError:
                pass
            received = _received(reading, process, time.monotonic() + limit_seconds)
        finally:
            os.close(reading)
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    said, _, text = received.partition(b"\n")
    if not secrets.compare_digest(said, token.encode()):
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _received(reading: int, process: subprocess.Popen[bytes], deadline: float) -> bytes:
    received = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while len(received) <= REPORT_LIMIT_BYTES:
            has_ended = process.poll() is not None  # looked at first: it may have written before it ended
            if selector.select(0 if has_ended else 0.1):
                chunk = os.read(reading, 2**16)
                if not chunk:
                    return received
                received += chunk
            elif has_ended:  # a program that it left behind may hold the pipe
                return received
            elif time.monotonic() > deadline:
                print("The tests took too long.", flush=True)
                return b""
    return b""


class Report:
    """What a process of `report_of` reports to; made before any code under test is imported.

    It hides this module and the program that runs from code that is imported later.

    Attributes:
        asked: what the checker asks for.
    """

    def __init__(self) -> None:
        sys.modules.pop(__name__, None)
        sys.modules["__main__"] = ModuleType("__main__")
        self._descriptor = int(os.environ.pop(REPORT_FD))
        os.set_inheritable(self._descriptor, False)
        self._token = sys.stdin.buffer.read(2 * TOKEN_BYTES)
        self.asked: Any = json.loads(sys.stdin.buffer.read())
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)

        quote, write, close = encode_basestring_ascii, os.write, os.close

        def send(**report: str) -> None:
            """Report, once."""
            text = ",".join(f"{quote(name)}:{quote(value)}" for name, value in report.items())
            rest = memoryview(self._token + f"\n{{{text}}}".encode())
            while rest:
                rest = rest[write(self._descriptor, rest) :]
            close(self._descriptor)

        self.send = send


# Which tests there are, from the text of a file


def has_passed(name: str, outcomes: dict[str, str]) -> bool:
    """Return whether a test, and each set of its parameters, is reported as passed."""
    found = [outcome for one, outcome in outcomes.items() if one == name or one.startswith(f"{name}[")]
    return bool(found) and all(outcome in ("passed", "xfailed") for outcome in found)


def tests_in(text: str) -> list[str]:
    """Return the names of the tests in a file, as pytest writes them behind the name of the file."""
    tree = ast.parse(text)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found = [name for node in tree.body for name in _functions([node])]
    for name, node in classes.items():
        is_case = _is_case(name, classes)
        if is_case or name.startswith("Test"):
            found += [f"{name}::{method}" for method in dict.fromkeys(_methods(node, classes))]
    return found


def cases_in(text: str) -> set[str]:
    """Return the names of the classes in a file whose tests unittest runs."""
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    return {name for name in classes if _is_case(name, classes)}


def _functions(nodes: list[ast.stmt]) -> list[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node.name for node in nodes if isinstance(node, kinds) and node.name.startswith("test")]


def _methods(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[str]:
    above = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
    return [*(name for one in above if one is not node for name in _methods(one, classes)), *_functions(node.body)]


def _is_case(name: str, classes: dict[str, ast.ClassDef]) -> bool:
    if name not in classes:
        return name.endswith("TestCase")
    bases = [ast.unparse(base).rpartition(".")[2] for base in classes[name].bases]
    return any(base != name and _is_case(base, classes) for base in bases)


# Tests in the process of the code under test


def fingerprint(*owners: Any) -> dict[tuple[int, str], tuple[Any, ...]]:
    """Return what the functions of some classes and modules are: a second call shows whether one was replaced."""
    found: dict[tuple[int, str], tuple[Any, ...]] = {}
    for number, owner in enumerate(owners):
        for name, value in list(vars(owner).items()):
            if name.startswith("__") and name not in ("__call__", "__init__", "__import__", "__build_class__"):
                continue
            function = getattr(value, "__func__", value)
            if callable(function):
                found[number, name] = (id(value), id(getattr(function, "__code__", None)))
    return found


def watch(*owners: Any) -> Callable[[dict[str, str]], dict[str, str]]:
    """Return a function that returns outcomes; none if functions of these classes and modules were replaced since.

    Call it before any code under test runs, and keep what it returns in a local variable.
    """
    look, before = fingerprint, fingerprint(*owners)

    def unless_replaced(outcomes: dict[str, str]) -> dict[str, str]:
        if look(*owners) == before:
            return outcomes
        print("Functions of the test framework were replaced, so no test counts.", flush=True)
        return {}

    return unless_replaced


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


def paths_of_workspace() -> list[str]:
    """Return where programs of the workspace find its modules, as `python3 -m pytest` does."""
    here = os.getcwd()
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return [here, *(path for path in (f"{here}/src", f"{here}/lib") if os.path.isdir(path)), *given]


def run_pytest(files: list[str]) -> dict[str, str]:
    """Run tests by pytest in this process, and return how each has ended; empty: its functions were replaced.

    pytest is imported before any file of the workspace, unless the workspace is pytest's own repository: an agent's
    files of such names are left out before a check.

    Raises:
        ImportError: pytest is not installed.
    """
    paths = paths_of_workspace()
    names = ("pytest.py", "pytest/__init__.py", "_pytest/__init__.py", "pluggy/__init__.py")
    is_own = any(os.path.exists(os.path.join(path, name)) for path in paths for name in names)
    if is_own:
        sys.path[:0] = paths
    import pytest

    if not is_own:
        sys.path[:0] = paths
    from _pytest import reports, runner

    owners = (reports, reports.TestReport, runner, runner.CallInfo, Recorder, unittest.TestCase, unittest.TestResult)
    unless_replaced = watch(*owners)
    recorder = Recorder()
    pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", "--tb=short", *files], plugins=[recorder])
    return unless_replaced(recorder.outcomes)


def run_unittest(load: Callable[[], list[Any]]) -> dict[str, str]:
    """Load modules, run their tests of unittest, and return which have passed; empty: its functions were replaced."""
    passed: dict[str, str] = {}

    class Recorded(unittest.TextTestResult):
        def addSuccess(self, test: unittest.TestCase) -> None:
            super().addSuccess(test)
            path, _, method = test.id().rpartition(".")
            module, _, case = path.rpartition(".")
            passed[f"{module.replace('.', '/')}.py::{case}::{method}"] = "passed"

    case = unittest.case
    owners = (unittest.TestCase, case, case._Outcome, unittest.TestSuite, unittest.TestResult, unittest.TextTestResult)
    owners = (*owners, unittest.TestLoader, unittest.TextTestRunner, Recorded, builtins)
    unless_replaced = watch(*owners)
    for module in load():
        suite = unittest.defaultTestLoader.loadTestsFromModule(module)
        unittest.TextTestRunner(verbosity=2, resultclass=Recorded).run(suite)
    return unless_replaced(passed)
