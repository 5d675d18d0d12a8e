"""Other programs as the tests see them: each may end between two looks."""

from __future__ import annotations

from contextlib import suppress

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty once it has ended."""
    with suppress(psutil.NoSuchProcess):  # a zombie is one, too
        return process.cmdline()
    return []
