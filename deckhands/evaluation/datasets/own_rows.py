"""Rows of our own format, in files and from plug-ins.

    {"id": "…", "task": "…", "workspace": "DIR", "setup": "…", "check": "…", "hidden": "DIR", "answer": "…",
     "tests": [], "isolated": false, "rewards": false, "images": [], "tags": []}

Holds: paths are relative to the dataset's file. A plug-in may give files as a mapping of paths to texts or bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from broker.runtime import UsageError
from deckhands.client import ADDRESSES, DATA, to_image_urls
from deckhands.evaluation.datasets.file_trees import (
    COMMAND,
    FileSource,
    MemoryFiles,
    TreeFile,
    build_test_check,
    read_tree,
    require_fit,
)
from deckhands.evaluation.datasets.instances import ID, Instance
from deckhands.evaluation.datasets.repositories import is_safe


class OwnRow(BaseModel):
    """One row.

    Attributes:
        workspace: the directory with the initial files of an attempt, or the files themselves; None for an empty
            workspace.
        setup: a command that runs before the agent starts, and before the check.
        check: a command in the workspace; exit code 0 means that the attempt is right.
        rewards: whether the last line of the check's output is rewards, as JSON; see `rewards`.
        hidden: a directory, or files, that are laid over the workspace before the check.
        tests: instead of a check: Python files among the hidden ones; all their tests must pass.
        isolated: whether these tests run in another process than the code that they import.
        answer: the expected final message; compared by `answers.is_same`.
        images: the images of the task: paths or addresses.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=ID)
    task: str = Field(min_length=1, max_length=100_000)
    workspace: str | Mapping[str, str | bytes] | None = None
    setup: str | None = Field(default=None, min_length=1)
    check: str | None = Field(default=None, min_length=1)
    rewards: bool = False
    hidden: str | Mapping[str, str | bytes] | None = None
    tests: tuple[str, ...] = ()
    isolated: bool = False
    answer: str | None = Field(default=None, min_length=1)
    images: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


def own_instance(row: Mapping[str, Any], folder: Path, *, is_scored: bool = False) -> Instance:
    """Return the instance of a row.

    Args:
        is_scored: whether a scorer or a critic decides rows without a check, tests and an answer.

    Raises:
        ValueError: the row is invalid.
    """
    found = OwnRow.model_validate(row)
    if found.check is None and found.answer is None and not found.tests and not is_scored:
        raise ValueError("it has no check, no tests and no answer, so nothing could be scored")
    if found.check is not None and found.tests:
        raise ValueError("it has both a check and tests")
    if found.rewards and found.check is None:
        raise ValueError("it has rewards, but no check that could write them")
    hidden = _files(folder, "hidden", found.hidden)
    for name in found.tests:
        if not name.endswith(".py") or name not in read_tree(hidden):
            raise ValueError(f"tests: {name!r} is not a Python file among the hidden ones")
    return Instance(
        found.id,
        found.task,
        workspace=_files(folder, "workspace", found.workspace),
        hidden=build_test_check(hidden, found.tests, isolated=found.isolated) if found.tests else hidden,
        setup=found.setup,
        check=COMMAND if found.tests else found.check,
        has_rewards=found.rewards,
        answer=found.answer,
        images=resolve_images(folder, found.images),
        tags=found.tags,
    )


def resolve_images(folder: Path, images: tuple[str, ...]) -> tuple[str, ...]:
    """Return pictures with their paths made absolute.

    Raises:
        ValueError: a file cannot be read, or is not a picture.
    """
    found = tuple(one if one.startswith((*ADDRESSES, DATA)) else str((folder / one).resolve()) for one in images)
    try:
        to_image_urls(found)
    except UsageError as error:
        raise ValueError(f"images: {error}") from error
    return found


def _files(folder: Path, name: str, place: str | Mapping[str, str | bytes] | None) -> Path | FileSource | None:
    if place is None:
        return None
    found = _normalize_files(name, place) if isinstance(place, Mapping) else (folder / place).resolve()
    if isinstance(found, Path) and not found.is_dir():
        raise ValueError(f"{name}: {found} is not a directory")
    try:
        require_fit(found)
    except UsageError as error:
        raise ValueError(f"{name}: {error.message.rstrip('.')}") from error
    return found


def _normalize_files(name: str, place: Mapping[str, str | bytes]) -> MemoryFiles:
    """Return files by their normalized paths."""
    found: dict[str, TreeFile] = {}
    for path, text in place.items():
        plain = PurePosixPath(path)
        if not is_safe(path) or not plain.parts:
            raise ValueError(f"{name}: {path!r} is no relative path")
        if str(plain) in found:
            raise ValueError(f"{name}: {path!r} is there twice")
        found[str(plain)] = TreeFile(text.encode() if isinstance(text, str) else text)
    for path in found:
        above = [str(one) for one in PurePosixPath(path).parents if str(one) in found]
        if above:
            raise ValueError(f"{name}: {above[0]!r} is a file and a directory")
    return MemoryFiles(found)
