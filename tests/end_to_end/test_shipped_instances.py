"""Each instance of the shipped benchmark: its hidden tests fail before the right repair, and pass after it."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.source_code import ROOT

SHIPPED = ROOT / "examples" / "shipped"
INSTANCES = sorted(path.parent for path in SHIPPED.glob("*/instance.toml"))
LIMIT_SECONDS = 60.0
MAX_FILE_BYTES = 10_000


def about(instance: Path) -> dict[str, Any]:
    return tomllib.loads((instance / "instance.toml").read_text(encoding="utf-8"))


def check(instance: Path, folder: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    for part in parts:
        if (instance / part).is_dir():
            shutil.copytree(instance / part, folder, dirs_exist_ok=True)
    return subprocess.run(
        ["bash", "-c", about(instance)["check"]],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda path: path.name)
def test_the_hidden_tests_tell_right_from_wrong(instance: Path, tmp_path: Path) -> None:
    missing = [program for program in about(instance)["needs"] if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {missing}")
    before = check(instance, tmp_path / "before", "workspace", "hidden")
    assert before.returncode != 0, before.stdout + before.stderr
    after = check(instance, tmp_path / "after", "workspace", "solution", "hidden")
    assert after.returncode == 0, after.stdout + after.stderr


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda path: path.name)
def test_an_instance_is_whole(instance: Path) -> None:
    assert set(about(instance)) == {"level", "language", "needs", "title", "check"}
    assert about(instance)["level"] in ("easy", "medium", "hard")
    assert (instance / "task.md").read_text(encoding="utf-8").strip()
    files = [path for path in instance.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert all(path.stat().st_size < MAX_FILE_BYTES for path in files)
    assert {path.relative_to(instance).parts[0] for path in files} == {
        *("instance.toml", "task.md", "workspace", "hidden", "solution")
    }


def test_there_are_enough_of_each_level() -> None:
    levels = Counter(about(instance)["level"] for instance in INSTANCES)
    assert set(levels) == {"easy", "medium", "hard"}
    assert len({about(instance)["language"] for instance in INSTANCES}) >= 4
