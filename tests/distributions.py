"""Installed distributions, and their requirements."""

from __future__ import annotations

from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed_by(*names: str) -> dict[str, Distribution]:
    """Return distributions and those that they need on this machine without their extras, by name."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found:
            try:
                found[name] = distribution(name)
            except PackageNotFoundError:
                continue  # an optional companion, such as async-timeout on this Python
            needed = [Requirement(line) for line in found[name].requires or ()]
            waiting += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found
