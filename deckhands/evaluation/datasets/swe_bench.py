"""Rows in the format of SWE-bench: an issue of a repository, and the tests that pass once it is resolved.

    {"instance_id": "…", "repo": "OWNER/NAME", "base_commit": "…", "problem_statement": "…", "test_patch": "…",
     "FAIL_TO_PASS": […], "PASS_TO_PASS": […], "patch": "…"}

Source: https://github.com/SWE-bench/SWE-bench. Sets of the same form (Lite, Verified, SWE-Gym, …) work too.
Holds: the tests run in a workspace with the files of the commit, the agent's changes and, added last, the files of the
test patch.
Does not: install dependencies of a repository; the node, or the image of its instance, must have them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator

from broker.runtime import UsageError
from deckhands.evaluation.datasets.docker_images import DOCKER, ENTER, ImageFiles, find_image
from deckhands.evaluation.datasets.file_trees import COMMAND, program_files
from deckhands.evaluation.datasets.human_eval import make_command_script
from deckhands.evaluation.datasets.instances import ID, Instance
from deckhands.evaluation.datasets.repositories import (
    ArchiveFiles,
    CommitFiles,
    PatchedFiles,
    find_instance_files,
    find_touched_files,
    is_safe,
)

KEYS = frozenset({"instance_id", "repo", "base_commit", "test_patch"})
OWN_RUNNER: Mapping[str, tuple[str, ...]] = {"django/django": ("tests/runtests.py", "tests/test_sqlite.py")}
"""Files with which a repository runs its tests: those of the commit are used, whatever an agent changes in them."""
TASK = (
    "Your working directory has the files of the repository {repo}. Resolve the following issue by changing its "
    "sources. Hidden tests decide whether it is resolved.\n\n<issue>\n{issue}\n</issue>"
)


class _SweBenchRow(BaseModel):
    model_config = ConfigDict(extra="ignore")

    instance_id: str = Field(pattern=ID)
    repo: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    base_commit: str = Field(pattern=r"^[0-9a-fA-F]{7,64}$")
    problem_statement: str = Field(min_length=1, max_length=90_000)
    test_patch: str = ""
    fail_to_pass: list[str] = Field(alias="FAIL_TO_PASS", min_length=1)
    pass_to_pass: list[str] = Field(alias="PASS_TO_PASS", default=[])
    patch: str = ""
    difficulty: str | None = None
    image: str = Field(default="", validation_alias=AliasChoices("image_name", "docker_image", "image"))

    @field_validator("fail_to_pass", "pass_to_pass", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """Parse a list that is written as a text, as in the published files."""
        return json.loads(value) if isinstance(value, str) else value


def swe_bench_instance(row: Mapping[str, Any], repositories: Path | None) -> Instance:
    """Return the instance of a row.

    Raises:
        ValueError: a field is wrong, the repository is missing, or the test patch does not apply.
    """
    found = _SweBenchRow.model_validate(row)
    if repositories is None:
        raise ValueError(f"its repository {found.repo} is not known: name --repositories DIR, or --repositories docker")
    before, image = _find_files(found, repositories)
    left, deleted = find_touched_files(found.test_patch)
    wrong = [name for name in (*left, *deleted) if not is_safe(name)]
    if wrong:
        raise ValueError(f"test_patch: {wrong[0]!r} is no relative path")
    asked = {
        "repo": found.repo,
        "tests": [*found.fail_to_pass, *found.pass_to_pass],
        "files": [name for name in left if name.endswith(".py")],
        "deleted": list(deleted),
    }
    further = tuple(program_files("swe_bench", asked).items())
    runner = OWN_RUNNER.get(found.repo, ())
    names = (*dict.fromkeys((*left, *deleted, *runner)),)
    hidden = PatchedFiles(before, found.test_patch, names, further) if found.test_patch.strip() else None
    if hidden is not None and not image:  # an image is read when an attempt starts
        try:
            hidden.read()
        except UsageError as error:
            raise ValueError(f"test_patch: {error}") from error
    gold = base64.b64encode(found.patch.encode()).decode()
    return Instance(
        found.instance_id,
        TASK.format(repo=found.repo, issue=found.problem_statement.strip()),
        workspace=before,
        hidden=hidden or PatchedFiles(before, "", runner, further),
        check=f"{ENTER if image else ''}{COMMAND}",
        image=image,
        tags=(found.repo, *([found.difficulty] if found.difficulty else [])),
        turns=make_command_script(f"echo {gold} | base64 -d | git apply -") if found.patch else (),
    )


def _find_files(row: _SweBenchRow, repositories: Path) -> tuple[CommitFiles | ArchiveFiles | ImageFiles, str]:
    """Return the source of the files, and the image of the containers; empty if there is none."""
    if str(repositories) == DOCKER:
        image = find_image(row.instance_id, row.image)
        return ImageFiles(image), image
    before = find_instance_files(repositories, row.instance_id, row.repo, row.base_commit)
    assert isinstance(before, CommitFiles | ArchiveFiles)
    return before, ""
