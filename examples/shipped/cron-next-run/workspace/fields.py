"""The fields of a schedule."""


def parse(text, first, last):
    """Return the set of values that the field allows."""
    values = set()
    for part in text.split(","):
        if part == "*":
            values.update(range(first, last + 1))
        elif part.startswith("*/"):
            values.update(range(first, last + 1, int(part[2:])))
        elif "-" in part:
            start, end = part.split("-")
            values.update(range(int(start), int(end)))
        else:
            values.add(int(part))
    return values
