"""Whether an answer is right: the same text after normalization, the same number, or the same list."""

from __future__ import annotations

import re
import string
from contextlib import suppress

FINAL = re.compile(r"final answer\s*:", re.IGNORECASE)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_UNITS = str.maketrans("", "", "$%,")


def answer_in(message: str) -> str:
    """Return the text after the last `FINAL ANSWER:`, or the whole message."""
    return FINAL.split(message)[-1].strip()


def is_same(given: str, expected: str) -> bool:
    """Say whether an answer is the expected one.

    If a number is expected, the answer is compared as a number, without unit signs and thousands separators. A list
    separated by commas or semicolons is compared element by element. Other text is compared without case, articles,
    punctuation and spaces.
    """
    if (number := _number(expected)) is not None:
        return _number(given) == number
    if re.search(r"[,;]", expected):
        ours, theirs = re.split(r"[,;]", given), re.split(r"[,;]", expected)
        return len(ours) == len(theirs) and all(is_same(*pair) for pair in zip(ours, theirs, strict=True))
    return _plain(given) == _plain(expected)


def _number(text: str) -> float | None:
    with suppress(ValueError):
        return float(text.strip().translate(_UNITS))
    return None


def _plain(text: str) -> str:
    without = _ARTICLES.sub(" ", text.lower())
    return "".join(char for char in without if char not in string.punctuation and not char.isspace())
