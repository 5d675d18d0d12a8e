"""Checks a file that was just edited for clear errors: its syntax, and undefined names.

Holds: nothing of the file is run and no configuration of the project is read; time and text are bounded. Checkers that
are not installed are skipped.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator

from tool_worker.host.search.limited_work import run_limited, run_program

LIMIT_SECONDS = 8.0
PROGRAM_SECONDS = 4.0
MAX_FILE_BYTES = 1_000_000
MAX_FILES = 10
MAX_PROBLEMS = 5
MAX_PROBLEM_CHARS = 200
RUFF = ("ruff", "check", "--isolated", "--no-cache", "--quiet", "--output-format=concise", "--select=E9,F63,F7,F82")


def find_problems(paths: list[str]) -> str:
    """Return a head and one line for each problem; empty if there is none."""

    def work(write: Callable[[str], None]) -> None:
        for path in paths[:MAX_FILES]:
            found = list(_problems(path))
            for problem in found[:MAX_PROBLEMS]:
                write(f"{os.path.basename(path)}: {problem[:MAX_PROBLEM_CHARS]}\n")
            if len(found) > MAX_PROBLEMS:
                write(f"{os.path.basename(path)}: {len(found) - MAX_PROBLEMS} more\n")

    text, _ = run_limited(LIMIT_SECONDS, work)
    return f"\n[Check after the edit:\n{text.rstrip()}]" if text.strip() else ""


def _problems(path: str) -> Iterator[str]:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError:
        return
    if len(content) > MAX_FILE_BYTES:
        return
    ending = os.path.splitext(path)[1].lower()
    if ending in (".py", ".pyi"):
        yield from _python(path, content)
    elif ending == ".json":
        try:
            json.loads(content)
        except (ValueError, RecursionError) as error:
            yield str(error)
    elif shutil.which("node"):
        yield from _javascript(path)


def _python(path: str, content: bytes) -> Iterator[str]:
    version = ".".join(map(str, sys.version_info[:2]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(content)
    except SyntaxError as error:
        yield f"line {error.lineno}: {error.msg} (as Python {version} reads it)"
        return
    except (ValueError, RecursionError, MemoryError):
        return
    if shutil.which("ruff"):
        lines = _output([*RUFF, "--", path])
    elif shutil.which("pyflakes"):
        lines = [line for line in _output(["pyflakes", path]) if "undefined name" in line]
    else:
        return
    for line in lines:
        if line.startswith(path):
            yield "line " + line.removeprefix(path).lstrip(":")


def _javascript(path: str) -> Iterator[str]:
    lines = _output(["node", "--check", path])
    message = next((line for line in lines if line.startswith("SyntaxError")), "")
    # These messages depend on the project's module settings.
    if message and "import statement outside a module" not in message and "Unexpected token 'export'" not in message:
        where = lines[0].removeprefix(f"{path}:") if lines[0].startswith(f"{path}:") else "?"
        yield f"line {where}: {message}"


def _output(command: list[str]) -> list[str]:
    ran = run_program(command, PROGRAM_SECONDS)
    return [] if ran is None else (ran.stdout + ran.stderr).decode("utf-8", "replace").splitlines()
