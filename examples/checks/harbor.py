"""Runs in the workspace of a check, by itself: the tests of a task, with its absolute paths turned into ours.

Holds: where the tests write a reward, that decides, as Harbor has it; else each test that the file has must be
reported as passed by pytest, see `guarded`.
Does not: keep programs that `test.sh` starts from writing the reward.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from guarded import confine, has_passed, protect, Report, report_of, run_pytest, tests_in  # noqa: E402

sys.path.pop(0)
LIMIT_SECONDS = 580.0


def main() -> int:
    """Run the tests; return 0 if the reward is 1."""
    protect()
    asked: dict[str, Any] = json.loads((HERE / "asked.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder, "verifier")
        logs.mkdir()
        places = {"/logs/verifier": logs, "/tests": HERE / "tests", asked["directory"].rstrip("/"): Path.cwd()}
        for path in (HERE / "tests").rglob("*"):
            if path.is_file():
                _turn(path, {name: str(place) for name, place in places.items() if name})
        variables = asked.get("variables", {})
        if "pytest" in asked:
            reward, metrics = _passed(HERE / "tests" / asked["pytest"], variables), {}
        else:
            command = ["bash", str(HERE / "tests" / "test.sh")]
            try:
                subprocess.run(command, timeout=LIMIT_SECONDS, env={**os.environ, **variables}, check=False)
            except subprocess.TimeoutExpired:
                print(f"The tests took longer than {LIMIT_SECONDS:.0f} seconds.")
                return 1
            reward, metrics = _rewards(logs)
    print(f"The reward is {reward:g}.")
    print(json.dumps({"reward": reward, "metrics": metrics}), flush=True)
    return 0 if reward >= 1.0 else 1


def _passed(file: Path, variables: dict[str, str]) -> float:
    """Run a file by pytest, and return 1 if each of its tests has passed."""
    name = os.path.relpath(file)
    expected = [f"{name}::{test}" for test in tests_in(file.read_text(encoding="utf-8"))]
    found = report_of([sys.executable, "-I", str(HERE / "run.py"), "--pytest"], [name], LIMIT_SECONDS, **variables)
    wrong = [one for one in expected if not has_passed(one, found)]
    wrong += [one for one, outcome in found.items() if outcome == "failed" and one not in wrong]
    for one in wrong[:50]:
        print(f"{one}: did not pass")
    return float(bool(expected) and not wrong)


def run_tests() -> None:
    """Run pytest in this process, and report how each test has ended."""
    report = Report()
    confine()
    report.send(**run_pytest(report.asked))


def _turn(path: Path, places: dict[str, str]) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    names = "|".join(re.escape(name) for name in places)
    turned = re.sub(rf"(?<![\w./-])({names})(?![\w.-])", lambda found: places[found[0]], text)
    if turned != text:
        path.write_text(turned, encoding="utf-8")


def _rewards(logs: Path) -> tuple[float, dict[str, float]]:
    """Return the reward that the tests wrote, and the other numbers beside it."""
    try:
        if (logs / "reward.json").exists():
            found = json.loads((logs / "reward.json").read_text(encoding="utf-8"))
            numbers = {str(name): _number(value) for name, value in found.items()}
            reward = numbers.pop("reward") if "reward" in numbers or len(numbers) != 1 else next(iter(numbers.values()))
            return reward, numbers
        return _number((logs / "reward.txt").read_text(encoding="utf-8").strip()), {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0.0, {}


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


if __name__ == "__main__":
    if sys.argv[1:] == ["--pytest"]:
        run_tests()
    else:
        sys.exit(main())
