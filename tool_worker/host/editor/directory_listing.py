"""The `view` command for directories: two levels; hidden entries are counted and left out.

Holds: the text and the memory are bounded, however large the directories are.
Does not: define which part of a directory is shown if the whole is too large.
"""

from __future__ import annotations

import os

from tool_worker.host.text_files.file_errors import FileAccessError

_CLIPPED_NOTICE = (
    "<response clipped><NOTE>Due to the max output limit, only part of this directory has been shown to you. "
    "You should use `ls -la` instead to view large directories incrementally.</NOTE>"
)


def list_directory(path: str, limit_chars: int) -> str:
    """List a directory and its subdirectories, each followed by its entries in the order of their names.

    Symbolic links are followed. A subdirectory that cannot be read is shown without its entries.

    Args:
        path: Absolute path of the directory.
        limit_chars: Bound of the list itself, without header and notices.

    Raises:
        FileAccessError: the directory itself cannot be read.
    """
    root = path.rstrip("/") + "/"
    try:
        names, hidden_count = _read_names(root, limit_chars)
    except OSError as error:
        raise FileAccessError(error, f"list {path}") from error
    # Differs: each directory is followed by its own entries, because the order of `sort` depends on the locale.
    listing = root
    for name in names:
        listing += _list_entry(root + name, limit_chars)
        if len(listing) > limit_chars:
            listing = listing[:limit_chars] + _CLIPPED_NOTICE
            break
    text = f"Here's the files and directories up to 2 levels deep in {path}, excluding hidden items:\n{listing}"
    if hidden_count:
        text += (
            f"\n\n{hidden_count} hidden files/directories in this directory are excluded. "
            f"You can use 'ls -la {path}' to see them."
        )
    return text


def _list_entry(path: str, limit_chars: int) -> str:
    """Return the path of an entry on one line and, for a directory, the paths in it on the next lines."""
    if not os.path.isdir(path):
        return f"\n{path}"
    directory = path + "/"
    try:
        names, _ = _read_names(directory, limit_chars)
    except OSError:
        names = []
    lines = [directory]
    for name in names:
        entry = directory + name
        lines.append(entry + "/" if os.path.isdir(entry) else entry)
    return "".join("\n" + line for line in lines)


def _read_names(directory: str, limit: int) -> tuple[list[str], int]:
    """Return the sorted names of at most `limit` visible entries, and the number of hidden ones found so far."""
    names = []
    hidden_count = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                hidden_count += 1
                continue
            names.append(entry.name)
            # A name takes at least two characters with its line break, so more names could not be shown.
            if len(names) >= limit:
                break
    return sorted(names), hidden_count
