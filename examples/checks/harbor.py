"""Runs in the workspace of a check, by itself: the tests of a task, with its absolute paths turned into ours.

Holds: where the tests write a reward, that decides, as Harbor has it; else the end of pytest does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 580.0
HERE = Path(__file__).resolve().parent


def main() -> int:
    """Run the tests; return 0 if the reward is 1."""
    asked: dict[str, Any] = json.loads((HERE / "asked.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder, "verifier")
        logs.mkdir()
        places = {"/logs/verifier": logs, "/tests": HERE / "tests", asked["directory"].rstrip("/"): Path.cwd()}
        for path in (HERE / "tests").rglob("*"):
            if path.is_file():
                _turn(path, {name: str(place) for name, place in places.items() if name})
        if "pytest" in asked:
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                str(HERE / "tests" / asked["pytest"]),
            ]
        else:
            command = ["bash", str(HERE / "tests" / "test.sh")]
        try:
            variables = {**os.environ, **asked.get("variables", {})}
            done = subprocess.run(command, timeout=LIMIT_SECONDS, env=variables, check=False)
        except subprocess.TimeoutExpired:
            print(f"The tests took longer than {LIMIT_SECONDS:.0f} seconds.")
            return 1
        reward = 1.0 if "pytest" in asked and done.returncode == 0 else _reward(logs)
    print(f"The reward is {reward:g}.")
    return 0 if reward >= 1.0 else 1


def _turn(path: Path, places: dict[str, str]) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    names = "|".join(re.escape(name) for name in places)
    turned = re.sub(rf"(?<![\w./-])({names})(?![\w.-])", lambda found: places[found[0]], text)
    if turned != text:
        path.write_text(turned, encoding="utf-8")


def _reward(logs: Path) -> float:
    try:
        if (logs / "reward.json").exists():
            return float(json.loads((logs / "reward.json").read_text(encoding="utf-8"))["reward"])
        return float((logs / "reward.txt").read_text(encoding="utf-8").strip())
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


if __name__ == "__main__":
    sys.exit(main())
