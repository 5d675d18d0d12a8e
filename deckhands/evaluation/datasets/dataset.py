"""Find a dataset by its name, and read it: `shipped`, a file of rows, directories of tasks, or a plug-in's.

An installed package may have functions that yield rows of our own format; see docs/evaluation.md.

Holds: everything is checked before any attempt starts. Unusable parts are listed, by line, row or task. Rows are
checked like those of a file; an error names the number of the row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from broker.runtime import UsageError
from broker.tools import entry_points
from deckhands.evaluation.datasets import human_eval, questions, swe_bench
from deckhands.evaluation.datasets.harbor import find_tasks, harbor_instance
from deckhands.evaluation.datasets.inspect_tasks import INSPECT, inspect_defaults, inspect_instances
from deckhands.evaluation.datasets.instances import SHIPPED, DatasetDefaults, Instance
from deckhands.evaluation.datasets.own_rows import own_instance
from deckhands.evaluation.datasets.shipped import read_shipped_instances

ENTRY_POINTS = "deckhands.datasets"


def list_installed() -> list[str]:
    """Return the names of the datasets in installed packages."""
    return sorted(entry_points(ENTRY_POINTS).names)


def read_rows(name: str, argument: str) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the rows of an installed dataset, numbered from 1.

    Raises:
        UsageError: its package cannot be loaded, or fails.
    """
    try:
        found: Iterable[Mapping[str, Any]] = entry_points(ENTRY_POINTS)[name].load()(argument)
        return list(enumerate(found, 1))
    except UsageError:
        raise
    except Exception as error:  # any error of the package
        raise UsageError(
            f"The dataset {name!r} cannot be read: {type(error).__name__}: {str(error)[:300]}.",
            remedy=f"Ask the package that has the entry point {name!r} of {ENTRY_POINTS}.",
        ) from error


def find_folder(argument: str) -> Path:
    """Return the directory that paths in rows are relative to: the directory of the argument, if it is a path."""
    path = Path(argument or ".")
    return path if path.is_dir() else path.parent


SHOWN_LINES = 10
Row = Mapping[str, Any]


def to_absolute_name(name: str) -> str:
    """Return a dataset's name in a form that is independent of the working directory.

    Raises:
        UsageError: it is empty.
    """
    if not name.strip():
        raise UsageError("The dataset has no name.", remedy=f"Name a file, a directory of tasks, or {SHIPPED!r}.")
    kind, has_argument, argument = name.partition(":")
    if has_argument and kind == INSPECT:
        path, _, task = argument.partition("@")
        return f"{INSPECT}:{Path(path).resolve()}" + (f"@{task}" if task else "")
    is_path = Path(name).exists() or (kind != SHIPPED and kind not in list_installed())
    return str(Path(name).resolve()) if is_path else name


def read_dataset(name: str | Path, *, repositories: Path | None = None, is_scored: bool = False) -> list[Instance]:
    """Return the instances of a dataset.

    Args:
        name: `shipped`, the path of a file or a directory, `inspect:FILE@TASK`, or `NAME:ARGUMENT` of a plug-in.
        repositories: the directory with mirrors or archives of the repositories that SWE-bench rows name.
        is_scored: whether a scorer or a critic decides instances that nothing else decides.

    Raises:
        UsageError: no dataset has this name, it cannot be read, or parts of it are invalid; the text names these.
    """
    if str(name) == SHIPPED:
        return read_shipped_instances()
    path = Path(name)
    if path.is_dir():
        return _check_rows(name, "task", [(folder.name, folder) for folder in find_tasks(path)], harbor_instance)
    kind, has_argument, argument = str(name).partition(":")
    if not path.exists():
        if has_argument and kind == INSPECT:
            return inspect_instances(argument, is_scored=is_scored)
        if kind in list_installed():
            folder = find_folder(argument)
            return _check_rows(
                name, "row", read_rows(kind, argument), lambda row: own_instance(row, folder, is_scored=is_scored)
            )
    rows = _parse_rows(path)
    keys = frozenset(next((row for _, row in rows if isinstance(row, Mapping)), ()))
    if keys >= swe_bench.KEYS:
        return _check_rows(name, "line", rows, lambda row: swe_bench.swe_bench_instance(row, repositories))
    if keys >= human_eval.KEYS:
        return _check_rows(name, "line", rows, human_eval.human_eval_instance)
    if keys >= questions.KEYS:
        return _check_rows(name, "line", rows, lambda row: questions.question_instance(row, path.parent))
    return _check_rows(name, "line", rows, partial(own_instance, folder=path.parent, is_scored=is_scored))


def read_defaults(name: str) -> DatasetDefaults:
    """Return the settings that come with a dataset; only tasks of inspect have such.

    Raises:
        UsageError: it cannot be read.
    """
    kind, has_argument, argument = name.partition(":")
    is_task = has_argument and kind == INSPECT and not Path(name).exists()
    return inspect_defaults(argument) if is_task else DatasetDefaults()


def _parse_rows(path: Path) -> list[tuple[int, Any]]:
    """Return the rows of a file by their lines; an error in place of a line that is not JSON."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        others = "".join(f", {other!r}" for other in list_installed())
        raise UsageError(
            f"The dataset {path} cannot be read: {why}.",
            remedy=f"Name a file of JSON lines, a directory of tasks, {SHIPPED!r}{others}.",
        ) from error
    found: list[tuple[int, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            row = error
        else:
            if not isinstance(row, dict):
                row = ValueError("it is not a JSON object")
        found.append((number, row))
    return found


def _check_rows(
    name: str | Path, unit: str, rows: Iterable[tuple[object, Any]], instance_of: Callable[[Any], Instance]
) -> list[Instance]:
    found: dict[str, Instance] = {}
    wrong: list[str] = []
    for number, row in rows:
        try:
            if isinstance(row, Exception):
                raise row
            instance = instance_of(row)
            if instance.id in found:
                raise ValueError(f"another {unit} has the id {instance.id!r}")  # noqa: TRY301  (listed below)
        except ValueError as error:
            wrong.append(f"{unit} {number}: {_describe_error(error)}")
        except UsageError as error:
            wrong.append(f"{unit} {number}: {str(error).rstrip('.')}")
        else:
            found[instance.id] = instance
    if wrong or not found:
        shown = "; ".join(wrong[:SHOWN_LINES]) or f"it has no {unit}s"
        more = f"; and {len(wrong) - SHOWN_LINES} more" if len(wrong) > SHOWN_LINES else ""
        raise UsageError(
            f"The dataset {name} cannot be used: {shown}{more}.", remedy="Correct it; nothing was started."
        )
    return list(found.values())


def _describe_error(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else str(first["msg"])
