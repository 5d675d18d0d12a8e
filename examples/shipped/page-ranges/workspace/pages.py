"""Selections of pages such as 1-3,5."""


def expand(text, count):
    """Return the pages to print of a document with count pages, in order."""
    result = []
    for part in text.split(","):
        if "-" in part:
            first, last = part.split("-")
            result += range(int(first), int(last))
        else:
            result.append(int(part))
    return result


def compress(numbers):
    """Write ascending page numbers as short as possible."""
    parts = []
    start = previous = None
    for number in numbers:
        if previous is not None and number == previous + 1:
            previous = number
            continue
        if start is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = number
    return ",".join(parts)
