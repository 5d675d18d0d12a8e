"""Compare an answer with the expected one: as normalized text, as a number, or as a list."""

from __future__ import annotations

import math
import re
import string
from contextlib import suppress

FINAL = re.compile(r"final answer\s*:", re.IGNORECASE)
_MARKS = "*_` \t\r\n"
"""Characters that Markdown puts around words."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_UNITS = str.maketrans("", "", "$%,")
_ONE_NUMBER = re.compile(r"[^,]*|\D*\d{1,3}(,\d{3})+(\.\d*)?\D*")
"""A text whose commas, if any, separate thousands."""


def find_answer(message: str) -> str:
    """Return the text after the last `FINAL ANSWER:`, or the whole message."""
    *before, last = FINAL.split(message)
    return last.strip(_MARKS) if before else last.strip()


def is_same(given: str, expected: str) -> bool:
    """Return whether an answer equals the expected one.

    If a number is expected, the answer is compared as a number, without unit signs and thousands separators. A list
    separated by commas or semicolons is compared element by element. Other text is compared without case, articles,
    punctuation and spaces, unless nothing is left then.
    """
    if _ONE_NUMBER.fullmatch(expected.strip()) and (number := _number(expected)) is not None:
        return _number(given) == number
    if re.search(r"[,;]", expected):
        ours, theirs = re.split(r"[,;]", given), re.split(r"[,;]", expected)
        return len(ours) == len(theirs) and all(is_same(*pair) for pair in zip(ours, theirs, strict=True))
    if _normalize(expected):
        return _normalize(given) == _normalize(expected)
    return _strip_articles(given) == _strip_articles(expected)


def _number(text: str) -> float | None:
    with suppress(ValueError):
        number = float(text.strip().translate(_UNITS))
        return None if math.isnan(number) else number
    return None


def _normalize(text: str) -> str:
    without = _ARTICLES.sub(" ", text.lower())
    return "".join(char for char in without if char not in string.punctuation and not char.isspace())


def _strip_articles(text: str) -> str:
    """Return a text without articles, and without punctuation unless nothing is left then."""
    lowered = "".join(text.lower().split())
    return "".join(char for char in lowered if char not in string.punctuation) or lowered
