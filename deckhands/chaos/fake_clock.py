"""The clock of one process, which can jump: libfaketime in front of the C library's functions of time.

The clock of a machine belongs to all its programs, and Linux has no other one for a container (a time namespace covers
the monotonic clocks only). So only a process that was started with this clock can see a jump.
Does not: change the monotonic clock; neither does a real correction of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

LIBRARIES = ("/usr/lib/*/faketime", "/usr/lib/faketime", "/usr/lib64/faketime", "/usr/local/lib/faketime")
LIBRARY = "libfaketimeMT.so.1"
"""The variant for programs with threads."""


@dataclass(frozen=True, slots=True)
class FakeClock:
    """The clock, as a file that the library reads at each call."""

    path: Path
    library: Path

    @classmethod
    def find_library(cls) -> Path | None:
        """Return the path of the library, as distributions install it."""
        found = (path for pattern in LIBRARIES for path in Path("/").glob(f"{pattern[1:]}/{LIBRARY}"))
        return next(found, None)

    @classmethod
    def create(cls, path: Path) -> Self | None:
        """Create a clock with the right time; None if the library is not installed."""
        library = cls.find_library()
        if library is None:
            return None
        clock = cls(path, library)
        clock.restore()
        return clock

    @property
    def environment(self) -> dict[str, str]:
        """The environment with which its process has to start."""
        return {
            "LD_PRELOAD": str(self.library),
            "FAKETIME_TIMESTAMP_FILE": str(self.path),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def step(self, seconds: int) -> None:
        """Let the clock differ from the machine's by some seconds, at once."""
        draft = self.path.with_suffix(".new")
        draft.write_text(f"{seconds:+d}\n", encoding="ascii")
        draft.replace(self.path)

    def restore(self) -> None:
        """Let the clock show the machine's time. Idempotent."""
        self.step(0)
