"""Entry points of installed packages.

Holds: the import path is scanned once for each group, because there may be hundreds of packages, each with a file to
read.
Does not: load anything.
"""

from __future__ import annotations

import functools
import sys
from importlib import metadata


def entry_points(group: str) -> metadata.EntryPoints:
    """Return the entry points of a group in all importable packages."""
    return _load_entry_points(group, tuple(sys.path))


@functools.cache
def _load_entry_points(group: str, path: tuple[str, ...]) -> metadata.EntryPoints:  # noqa: ARG001  (another path, other packages)
    return metadata.entry_points(group=group)
