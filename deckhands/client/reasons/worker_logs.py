"""Search the logs of workers on this machine for lines about a conversation or about workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

READ_BYTES = 256 * 1024
"""The number of bytes read from the end of each file."""
MAX_FILES = 200
MAX_LINES = 12
LINE_CHARS = 400


def lines_about(folder: Path, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the latest lines that contain one of these ids, oldest first within a file. Blocks. Raises nothing.

    Args:
        folder: a folder with files `*.log`; a file that cannot be read is left out.
    """
    found: list[str] = []
    try:
        files = sorted(folder.glob("*.log"))[:MAX_FILES]
    except OSError:
        return ()
    for path in files:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - READ_BYTES))
                text = file.read(READ_BYTES).decode(errors="replace")
        except OSError:
            continue
        lines = [line for line in text.splitlines() if any(name in line for name in wanted)]
        found += [f"{path.stem}: {line}"[:LINE_CHARS] for line in lines[-MAX_LINES:]]
    return tuple(found[-MAX_LINES:])
