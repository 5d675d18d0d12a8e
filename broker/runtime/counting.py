"""Numbers with their nouns, for people and models."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 file`, `1,234 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
