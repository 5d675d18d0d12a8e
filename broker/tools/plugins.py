"""What installed packages bring: their entry points.

Holds: the packages on a path are looked through once for each group; there may be hundreds, each with a file to read.
Does not: load anything.
"""

from __future__ import annotations

import functools
import sys
from importlib import metadata


def entry_points(group: str) -> metadata.EntryPoints:
    """Return the entry points of a group, of the packages that can be imported now."""
    return _found(group, tuple(sys.path))


@functools.cache
def _found(group: str, path: tuple[str, ...]) -> metadata.EntryPoints:  # noqa: ARG001  (another path, other packages)
    return metadata.entry_points(group=group)
