"""Runs in the workspace of a check, by itself: calls the function that was asked for, as the hidden test says.

    run.py               the checker
    run.py --isolated    the test, with the function in another process; see `separate`

Holds: only a test that has run to its end counts, and it compares values in a process without the code under test.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import CodeType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from guarded import Report, confine, protect, report_of  # noqa: E402
from separate import Subject  # noqa: E402

sys.path.pop(0)
LIMIT_SECONDS = 120.0


def main() -> int:
    """Test the function; return 0 if it is right."""
    protect()
    file = HERE / "asked.json"
    asked = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()  # the code under test shall not read the test
    found = report_of([sys.executable, "-I", str(Path(__file__).resolve()), "--isolated"], asked, LIMIT_SECONDS)
    is_right = found.get("is_right") == "yes"
    print("The function is right." if is_right else "The test did not pass.")
    return 0 if is_right else 1


def run_isolated() -> None:
    """Run the test here, and report at its end."""
    protect()
    report = Report()
    asked = report.asked
    confine()
    subject = Subject()
    try:
        solution = subject.module(asked["module"])
        program = compile(asked["test"], "test", "exec")
        names: dict[str, Any] = {"__name__": "test"}
        for name in sorted(_names_in(program)):  # a test may use other functions of the file, too
            try:
                names[name] = getattr(solution, name)
            except AttributeError:
                continue
        exec(program, names)
        names["check"](getattr(solution, asked["entry_point"]))
    finally:
        subject.end()
    report.send(is_right="yes")


def _names_in(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {name for name in code.co_names if not name.startswith("_")}.union(*map(_names_in, inner))


if __name__ == "__main__":
    if sys.argv[1:] == ["--isolated"]:
        run_isolated()
    else:
        sys.exit(main())
