"""Each shipped instance fails its check as the agent finds it, and passes it after the right repair."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

SHIPPED = Path(__file__).parents[2] / "deckhands" / "evaluation" / "shipped"
INSTANCES = sorted(path.parent for path in SHIPPED.glob("*/instance.toml"))
KEYS = {"level", "language", "needs", "title", "check"}
SECONDS = 20
LARGEST = 10_000

each_instance = pytest.mark.parametrize("instance", INSTANCES, ids=lambda path: path.name)


def described(instance: Path) -> dict:
    return tomllib.loads((instance / "instance.toml").read_text(encoding="utf-8"))


def lay_over(folder: Path, target: Path) -> None:
    shutil.copytree(folder, target, dirs_exist_ok=True)


def checked(instance: Path, target: Path, *layers: str) -> subprocess.CompletedProcess:
    about = described(instance)
    missing = [program for program in about["needs"] if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    for layer in layers:
        lay_over(instance / layer, target)
    return subprocess.run(
        ["bash", "-c", about["check"]], cwd=target, capture_output=True, text=True, errors="replace",
        timeout=SECONDS, check=False,
    )


def test_there_are_instances_of_every_level():
    levels = [described(instance)["level"] for instance in INSTANCES]
    assert levels.count("easy") >= 14
    assert levels.count("medium") >= 16
    assert levels.count("hard") >= 12


@each_instance
def test_the_description_is_complete(instance):
    about = described(instance)
    assert set(about) == KEYS
    assert about["level"] in {"easy", "medium", "hard"}
    assert about["needs"]
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", instance.name)
    assert {path.name for path in instance.iterdir()} == {"instance.toml", "task.md", "workspace", "hidden", "solution"}
    assert 5 <= len((instance / "task.md").read_text(encoding="utf-8").splitlines()) <= 25


@each_instance
def test_the_files_are_short_texts(instance):
    for path in instance.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert len(data) < LARGEST, path
            assert b"\0" not in data, path
            data.decode("utf-8")


@each_instance
def test_the_solution_has_only_what_differs(instance):
    for path in (instance / "solution").rglob("*"):
        if path.is_file():
            original = instance / "workspace" / path.relative_to(instance / "solution")
            assert not original.exists() or original.read_bytes() != path.read_bytes(), path


@each_instance
def test_the_check_fails_at_first(instance, tmp_path):
    assert checked(instance, tmp_path, "workspace", "hidden").returncode != 0


@each_instance
def test_the_check_passes_after_the_repair(instance, tmp_path):
    done = checked(instance, tmp_path, "workspace", "solution", "hidden")
    assert done.returncode == 0, done.stdout + done.stderr
