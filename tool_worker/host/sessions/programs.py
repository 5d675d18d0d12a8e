"""The session programs and their requirements, for tool workers and container images.

Does not: import anything but the standard library, because an image may have nothing else.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM_PLACES = (
    "/usr/lib/chromium/chromium",
    "/usr/lib64/chromium-browser/chromium-browser",
    "/usr/lib/chromium-browser/chromium-browser",
    "/opt/google/chrome/chrome",
)
"""Paths of the program itself; the command on the PATH is often a wrapper script."""


@dataclass(frozen=True, slots=True)
class SessionProgramSpec:
    """A session program and its requirements.

    Attributes:
        file: Path below the package `tool_worker`.
        packages: The packages that it imports.
        has_chromium: Whether it takes the path of Chromium as its argument.
    """

    file: str
    packages: tuple[str, ...]
    has_chromium: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """The required packages that this Python lacks."""
        return tuple(package for package in self.packages if find_spec(package) is None)


PROGRAMS: Mapping[str, SessionProgramSpec] = {
    "ipython": SessionProgramSpec("host/sessions/ipython_session.py", ("ipykernel", "jupyter_client")),
    "browser": SessionProgramSpec("host/browser/session.py", ("playwright", "PIL"), has_chromium=True),
}
"""By pool name, which is also the tool's name."""


def find_chromium() -> str | None:
    """Return the path of Chromium, or None."""
    found = next((place for place in CHROMIUM_PLACES if Path(place).is_file()), None)
    return found or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
