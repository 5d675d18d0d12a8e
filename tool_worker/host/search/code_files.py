"""The source files of a workspace that are searched as code.

Holds: links never lead outside of the root; the number of files and the size of each are bounded; files are ordered by
path.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache

MAX_FILES = 20_000
MAX_FILE_BYTES = 1_000_000
LEFT_OUT = frozenset({"node_modules", "__pycache__", "site-packages", "venv", "bower_components"})
"""Directories with third-party files; directories whose name starts with a dot are left out too."""

Stamp = tuple[int, int]


def list_code_files(root: str) -> tuple[dict[str, Stamp], bool]:
    """Return the files below a directory with their stamps, and whether there are more than `MAX_FILES`.

    A stamp changes when its file does. Paths are relative, without a leading `./`.
    """
    found: dict[str, Stamp] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in LEFT_OUT)
        for name in sorted(names):
            path = os.path.join(folder, name)
            try:
                status = os.lstat(path)
            except OSError:
                continue
            if not name.startswith(".") and (status.st_mode & 0o170000) == 0o100000:
                if len(found) == MAX_FILES:
                    return found, True
                found[os.path.relpath(path, root)] = (status.st_mtime_ns, status.st_size)
    return found, False


def text_of(root: str, path: str) -> str | None:
    """Return the text of a file; None if it is binary, too large, or cannot be read."""
    try:
        descriptor = os.open(os.path.join(root, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        try:
            content = file.read(MAX_FILE_BYTES + 1)
        except OSError:
            return None
    if len(content) > MAX_FILE_BYTES or b"\0" in content:
        return None
    return content.decode("utf-8", "replace")


@lru_cache(maxsize=256)
def pattern_of(glob: str) -> re.Pattern[str]:
    """Return the regular expression of a path pattern: `**/` any directories, `*` and `?` within a name, `{a,b}`."""
    expression = re.escape(re.sub(r"(\*\*/)+", "**/", glob))
    for written, meant in ((r"\*\*/", "(?:.*/)?"), (r"\*\*", ".*"), (r"\*", "[^/]*"), (r"\?", "[^/]")):
        expression = expression.replace(written, meant)
    expression = re.sub(r"\\\{([^{}]*)\\\}", lambda choice: f"(?:{choice[1].replace(',', '|')})", expression)
    return re.compile(expression + r"\Z", re.DOTALL)
