"""Numbers with their nouns, for texts."""

from __future__ import annotations


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun: `1 file`, `1,234 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
