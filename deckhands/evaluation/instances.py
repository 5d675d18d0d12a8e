"""What is evaluated: instances of a dataset, each a task, the files that it begins with, and how an attempt is scored.

    {"id": "…", "task": "…", "workspace": "DIR", "setup": "…", "check": "…", "hidden": "DIR", "answer": "…", "tags": []}

Holds: every line of a dataset is checked before anything begins; paths are relative to the dataset's file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from broker.runtime.errors import UsageError

SHIPPED = "shipped"
SHOWN_LINES = 10


class DatasetLine(BaseModel):
    """One line of a dataset.

    Attributes:
        workspace: the directory whose content an attempt begins with; None: an empty one.
        setup: a command that runs before the agent begins, and before the check.
        check: a command in the workspace; exit code 0 means that the attempt is right.
        hidden: a directory that is laid over the workspace before the check, and that the agent never sees.
        answer: what the agent has to say at the end; compared as `answers.is_same` says.
        images: of the task: paths or addresses.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    task: str = Field(min_length=1, max_length=100_000)
    workspace: str | None = None
    setup: str | None = Field(default=None, min_length=1)
    check: str | None = Field(default=None, min_length=1)
    hidden: str | None = None
    answer: str | None = Field(default=None, min_length=1)
    images: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance, with its directories found.

    Attributes:
        turns: how a scripted model solves it; empty: no script comes with it.
    """

    id: str
    task: str
    workspace: Path | None = None
    hidden: Path | None = None
    setup: str | None = None
    check: str | None = None
    answer: str | None = None
    images: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    turns: tuple[dict[str, Any], ...] = field(default=(), repr=False)


def read_dataset(path: Path) -> list[Instance]:
    """Return the instances of a file of JSON lines.

    Raises:
        UsageError: it cannot be read, or lines of it cannot be used; names these.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(
            f"The dataset {path} cannot be read: {why}.", remedy=f"Name a file of JSON lines, or {SHIPPED!r}."
        ) from error
    found: dict[str, Instance] = {}
    wrong: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            instance = _instance(DatasetLine.model_validate_json(line), path.parent, found)
        except ValueError as error:
            wrong.append(f"line {number}: {_why(error)}")
            continue
        found[instance.id] = instance
    if wrong or not found:
        shown = "; ".join(wrong[:SHOWN_LINES]) or "it has no lines"
        more = f"; and {len(wrong) - SHOWN_LINES} more" if len(wrong) > SHOWN_LINES else ""
        raise UsageError(f"The dataset {path} cannot be used: {shown}{more}.", remedy="Correct it; nothing has begun.")
    return list(found.values())


def _instance(line: DatasetLine, folder: Path, others: Mapping[str, Instance]) -> Instance:
    if line.id in others:
        raise ValueError(f"another line has the id {line.id!r}")
    if line.check is None and line.answer is None:
        raise ValueError("it has neither a check nor an answer, so nothing could be scored")
    return Instance(
        line.id,
        line.task,
        workspace=_directory(folder, "workspace", line.workspace),
        hidden=_directory(folder, "hidden", line.hidden),
        setup=line.setup,
        check=line.check,
        answer=line.answer,
        images=line.images,
        tags=line.tags,
    )


def _directory(folder: Path, name: str, text: str | None) -> Path | None:
    if text is None:
        return None
    found = (folder / text).resolve()
    if not found.is_dir():
        raise ValueError(f"{name}: {found} is no directory")
    return found


def _why(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else str(first["msg"])


def selected(
    instances: Sequence[Instance], *, only: str = "", part: str = "", shuffle: bool = False, seed: int = 0
) -> list[Instance]:
    """Return some of the instances.

    Args:
        only: a regular expression that the id or a tag has to match somewhere.
        part: which of them, after shuffling, as Python's slices: `:20`, `20:40`, `-5:`.

    Raises:
        UsageError: an argument cannot be used, or nothing is left.
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
            raise UsageError(f"--slice {part!r} is no slice.", remedy="Write it as :20, 20:40 or -5:.")
        chosen = chosen[slice(*(None if text is None else int(text) for text in match.groups()))]
    if not chosen:
        raise UsageError("No instance is left to evaluate.", remedy="Look at --filter and --slice.")
    return chosen
