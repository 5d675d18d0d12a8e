"""Each instance of the shipped benchmark: its hidden tests fail before the right repair, and pass after it."""

from __future__ import annotations

import shutil
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deckhands.evaluation.datasets.file_trees import read_tree
from deckhands.evaluation.datasets.shipped import read_shipped_instance
from tests.dataset_parts import checked
from tests.source_code import ROOT

SHIPPED = ROOT / "examples" / "shipped"
INSTANCES = sorted(path.parent for path in SHIPPED.glob("*/instance.toml"))
LIMIT_SECONDS = 60.0
MAX_FILE_BYTES = 10_000
NEEDED = {"level", "language", "needs", "title", "tests"}


def about(instance: Path) -> dict[str, Any]:
    return tomllib.loads((instance / "instance.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda path: path.name)
def test_the_hidden_tests_tell_right_from_wrong(instance: Path, tmp_path: Path) -> None:
    missing = [program for program in about(instance)["needs"] if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {missing}")
    found = read_shipped_instance(instance, about(instance))
    before = checked(found, tmp_path / "before", limit=LIMIT_SECONDS)
    assert before.returncode != 0, before.stdout + before.stderr
    solution = {name: file.content.decode() for name, file in read_tree(instance / "solution").items()}
    after = checked(found, tmp_path / "after", solution, limit=LIMIT_SECONDS)
    assert after.returncode == 0, after.stdout + after.stderr


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda path: path.name)
def test_an_instance_is_whole(instance: Path) -> None:
    assert set(about(instance)) - {"isolated", "in_process", "sources", "limit_seconds"} == NEEDED
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
