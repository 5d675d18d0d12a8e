"""Instances of a dataset: each a task, its initial files, and how an attempt is scored.

A dataset may also have default settings for an evaluation, for options that are not given.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from broker.contract import SETUP_SCRIPT
from broker.runtime import DeckhandsError, UsageError
from deckhands.evaluation.datasets.file_trees import FileSource, TreeFile, read_tree
from deckhands.evaluation.rewards import Rewards

SHIPPED = "shipped"
MAX_ID_CHARS = 100
NAMED = 3
SETUP_FAILED = "The set-up failed with exit code {code}."
"""The last line of a check whose set-up failed."""
ID = rf"^[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_ID_CHARS - 1}}}$"
Judge = Callable[[str], Awaitable[Rewards]]


class ScorerFailed(DeckhandsError):
    """The scorer that came with a dataset failed. This is not a result of the agent."""

    code = "scorer_failed"


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance.

    Attributes:
        task: the agent's task.
        workspace: the initial files of an attempt; None for none.
        hidden: files that are added to the workspace before the check. The agent never sees them.
        setup: a command that runs before the agent starts, and before the check.
        check: a command in the workspace; exit code 0 means that the attempt is right.
        has_rewards: whether the last line of the check's output is rewards, as JSON.
        answer: the expected final message; compared by `answers.is_same`.
        judge: returns the rewards of the agent's final message, if neither check nor answer decides; may raise
            ScorerFailed.
        images: the images of the task: paths or addresses.
        image: the image of the containers for attempts and checks; empty for the node's default sandbox.
        left_out: parts of its published form that an attempt does not have.
        turns: the solution by a scripted model; empty for none.
    """

    id: str
    task: str
    workspace: Path | FileSource | None = None
    hidden: Path | FileSource | None = None
    setup: str | None = None
    check: str | None = None
    answer: str | None = None
    judge: Judge | None = None
    has_rewards: bool = False
    images: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    image: str = ""
    left_out: tuple[str, ...] = ()
    turns: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    @property
    def whole_check(self) -> str:
        """The set-up, then the check, as separate commands."""
        assert self.check is not None
        return self.check if self.setup is None else f"{self.setup_check} && eval {shlex.quote(self.check)}"

    @property
    def setup_check(self) -> str:
        """The set-up alone. If it fails, its last line reports the failure."""
        assert self.setup is not None
        says = SETUP_FAILED.format(code="$?")
        return f'eval {shlex.quote(self.setup)} || {{ echo "{says}"; false; }}'

    def files(self) -> dict[str, TreeFile]:
        """Read the initial files of an attempt: the files of the workspace, and the set-up as a script.

        Raises:
            UsageError: the files cannot be read, or are too many.
        """
        found = read_tree(self.workspace)
        if self.setup is not None:
            found[SETUP_SCRIPT] = TreeFile(f"{self.setup}\n".encode(), is_executable=True)
        return found


def list_left_out(instances: Sequence[Instance]) -> list[str]:
    """Return the parts of the published form that instances lack, one line each, with the instances' names."""
    names: dict[str, list[str]] = {}
    for one in instances:
        for what in dict.fromkeys(one.left_out):
            names.setdefault(what, []).append(one.id)
    lines = []
    for what, found in names.items():
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        lines.append(f"{', '.join(found[:NAMED])}{more}: {what}")
    return lines


def select_instances(
    instances: Sequence[Instance], *, only: str = "", part: str = "", shuffle: bool = False, seed: int = 0
) -> list[Instance]:
    """Return some of the instances.

    Args:
        only: a regular expression to be found in the id or a tag.
        part: the part to take after shuffling, as a Python slice: `:20`, `20:40`, `-5:`.

    Raises:
        UsageError: an argument is invalid, or no instance is left.
    """
    chosen = list(instances)
    if only:
        try:
            pattern = re.compile(only)
        except re.error as error:
            raise UsageError(f"--filter {only!r} is no regular expression: {error}.") from error
        chosen = [one for one in chosen if any(pattern.search(text) for text in (one.id, *one.tags))]
    if shuffle:
        chosen.sort(key=lambda one: sha256(f"{seed}:{one.id}".encode()).digest())
    if part:
        match = re.fullmatch(r"(-?\d+)?:(-?\d+)?", part)
        if match is None:
            raise UsageError(f"--slice {part!r} is not a slice.", remedy="Write it as :20, 20:40 or -5:.")
        chosen = chosen[slice(*(None if text is None else int(text) for text in match.groups()))]
    if not chosen:
        raise UsageError("No instance is left to evaluate.", remedy="Change --filter or --slice.")
    return chosen


FIELDS = ("attempts", "max_iterations", "max_budget", "max_seconds")


@dataclass(frozen=True, slots=True)
class DatasetDefaults:
    """The settings.

    Attributes:
        values: by the field of `EvaluationRequest`, one of `FIELDS`.
        sources: the dataset's own words for them, such as `epochs=3`.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def resolve(self, given: Mapping[str, float | None]) -> tuple[dict[str, float], list[str]]:
        """Return the settings to use, and notes about the dataset's settings.

        Args:
            given: the options; None for an option that is not given.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        notes = []
        for name, value in self.values.items():
            if name not in chosen:
                chosen[name] = value
                notes.append(f"The dataset sets {name} to {value:g}: {self.sources[name]}.")
            elif chosen[name] != value:
                notes.append(f"The dataset's {self.sources[name]} is ignored: {name} is {chosen[name]:g}.")
        return chosen, notes
