"""The manifest of a checkpoint: its entries as rows of path, kind, mode, time, size and content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tool_worker.workspace.files.file_tree import DIRECTORY, FILE, LINK


def encoded(manifest: dict[str, Any]) -> bytes:
    """Serialize a manifest."""
    return json.dumps(manifest, separators=(",", ":")).encode("ascii")


def pieces_of(rows: list[list[Any]]) -> Iterator[str]:
    """Yield the hashes of all pieces of a checkpoint's files."""
    for row in rows:
        if row[1] == FILE:
            yield from row[5]


def are_sound(rows: list[list[Any]]) -> bool:
    """Return whether every entry's directory precedes it, so that no entry leads out, even through a link."""
    directories = {""}
    for row in rows:
        folder, _, name = row[0].rpartition("/")
        if len(row) != 6 or name in ("", ".", "..") or "\0" in name or folder not in directories:
            return False
        if row[1] == DIRECTORY:
            directories.add(row[0])
        elif row[1] not in (FILE, LINK):
            return False
    return True
