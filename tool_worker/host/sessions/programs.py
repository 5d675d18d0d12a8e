"""What session programs there are, and what each takes. Known on the tool worker and in the images of containers.

Does not: import anything but the standard library: an image need not have more.
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
"""Where distributions keep the program itself; what is in the search path is often a script around it."""


@dataclass(frozen=True, slots=True)
class Program:
    """A session program and what it takes.

    Attributes:
        file: below the package `tool_worker`.
        packages: that it imports.
        has_chromium: whether it gets the path of Chromium.
    """

    file: str
    packages: tuple[str, ...]
    has_chromium: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """The packages that this Python does not have."""
        return tuple(package for package in self.packages if find_spec(package) is None)


PROGRAMS: Mapping[str, Program] = {
    "ipython": Program("host/sessions/ipython_session.py", ("ipykernel", "jupyter_client")),
    "browser": Program("host/browser/session.py", ("playwright", "PIL"), has_chromium=True),
}
"""By pool, which is also the tool's name."""


def installed_chromium() -> str | None:
    """Return where Chromium is, or None."""
    found = next((place for place in CHROMIUM_PLACES if Path(place).is_file()), None)
    return found or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
