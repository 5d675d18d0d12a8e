"""Durations such as 1h30m."""

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse(text):
    """Return the seconds that the text stands for."""
    total = 0
    number = ""
    for char in text:
        if char.isdigit():
            number += char
        elif char == " ":
            continue
        elif char in UNITS:
            total += int(number) * UNITS[char]
            number = ""
        else:
            raise ValueError(f"unknown unit: {char}")
    return total


def show(seconds):
    """Write seconds in the notation that parse reads."""
    if seconds < 0:
        raise ValueError("a duration is not negative")
    rest = int(seconds)
    parts = []
    for unit, size in UNITS.items():
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
