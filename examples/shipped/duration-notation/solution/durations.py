"""Durations such as 1h30m."""

import re

UNITS = {"d": 86400000, "h": 3600000, "m": 60000, "s": 1000, "ms": 1}  # in milliseconds
PART = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|[dhms])\s*")


def parse(text):
    """Return the seconds that the text stands for."""
    total = 0
    at = 0
    smallest = None
    while at < len(text) or smallest is None:
        part = PART.match(text, at)
        if not part:
            raise ValueError(f"not a duration: {text!r}")
        size = UNITS[part[2]]
        if smallest is not None and size >= smallest:
            raise ValueError(f"units out of order: {text!r}")
        smallest = size
        total += float(part[1]) * size
        at = part.end()
    return total / 1000


def show(seconds):
    """Write seconds in the notation that parse reads."""
    if seconds < 0:
        raise ValueError("a duration is not negative")
    rest = round(seconds * 1000)
    parts = []
    for unit, size in UNITS.items():
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
