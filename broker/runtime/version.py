"""The version of Deckhands that this process runs."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def read_version() -> str:
    """Return the version of the installed package; `unknown` for a source tree that was never installed."""
    try:
        return metadata.version("deckhands")
    except metadata.PackageNotFoundError:
        return "unknown"
