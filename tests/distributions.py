"""Installed distributions, and their requirements."""

from __future__ import annotations

from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed_by(*names: str) -> dict[str, Distribution]:
    """Return distributions and those that they need on this machine without their extras, by name."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(name) for name in names]
    seen: set[tuple[str, str]] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        new = {(name, extra) for extra in ("", *wanted.extras)} - seen
        seen |= new
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # an optional companion, such as async-timeout on this Python
        waiting += [
            needed
            for needed in map(Requirement, found[name].requires or ())
            if any(needed.marker is None or needed.marker.evaluate({"extra": extra}) for _, extra in new)
        ]
    return found
