"""Unified diffs of two versions of a text.

Holds: linear in the size of the texts; a diff applied to the old text with `patch` gives the new one.
Does not: find the smallest diff. One edit changes one range of lines, so the change is everything between the common
head and the common tail. `difflib` would take minutes for some texts of 10 MB, and its import takes longer than the
whole start of the workspace host.
"""

from __future__ import annotations

import io

_CONTEXT_LINES = 3


def split_lines(text: str) -> list[str]:
    r"""Split at `\n` alone; every line but the last keeps its `\n`, and an empty text has no lines."""
    return io.StringIO(text).readlines()


def count_equal_ends(old: list[str], new: list[str]) -> tuple[int, int]:
    """Count the equal items at the start and, among the rest, at the end of two lists."""
    shorter = min(len(old), len(new))
    head = 0
    while head < shorter and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < shorter - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    return head, tail


def render_unified_diff(old: str, new: str, path: str) -> str:
    r"""Return the change from `old` to `new` as a unified diff with one hunk.

    Args:
        old: The text before, with `\n` as line break; "" for a file that did not exist.
        new: The text after.
        path: The name in both header lines.

    Returns:
        The diff, or "" if the texts are equal.
    """
    if old == new:
        return ""
    old_lines, new_lines = split_lines(old), split_lines(new)
    head, tail = count_equal_ends(old_lines, new_lines)
    start = max(0, head - _CONTEXT_LINES)
    old_change_end = len(old_lines) - tail
    new_change_end = len(new_lines) - tail
    old_end = min(len(old_lines), old_change_end + _CONTEXT_LINES)
    new_end = new_change_end + old_end - old_change_end
    hunk = [
        *(" " + line for line in old_lines[start:head]),
        *("-" + line for line in old_lines[head:old_change_end]),
        *("+" + line for line in new_lines[head:new_change_end]),
        *(" " + line for line in old_lines[old_change_end:old_end]),
    ]
    return "".join(
        [
            f"--- {path}\n+++ {path}\n",
            f"@@ -{_hunk_range(start, old_end)} +{_hunk_range(start, new_end)} @@\n",
            *(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in hunk),
        ]
    )


def _hunk_range(start: int, end: int) -> str:
    """Format the lines from `start` (from 0) up to `end` (exclusive); an empty range names the line before it."""
    length = end - start
    if length == 1:
        return str(start + 1)
    return f"{start + 1 if length else start},{length}"
