"""Datasets of installed packages: functions that yield rows of our own format; see docs/evaluation.md.

Holds: rows are checked like those of a file; an error names the number of the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from broker.runtime import UsageError
from broker.tools import entry_points

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
    """Return the directory that paths in rows are relative to: that of the argument, if it is a path."""
    path = Path(argument or ".")
    return path if path.is_dir() else path.parent
