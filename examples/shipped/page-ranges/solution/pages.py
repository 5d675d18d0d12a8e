"""Selections of pages such as 1-3,5."""


def page(text):
    """Return the number of a page, counted from 1."""
    number = int(text)
    if number < 1:
        raise ValueError(f"no page: {text}")
    return number


def expand(text, count):
    """Return the pages to print of a document with count pages, in order."""
    result = {}
    for part in text.split(","):
        if "-" in part:
            first, last = (end.strip() for end in part.split("-"))
            if not first and not last:
                raise ValueError(f"no page: {part}")
            start = page(first) if first else 1
            stop = page(last) if last else max(count, start)
            if start <= stop:
                numbers = range(start, min(stop, count) + 1)
            else:
                numbers = range(min(start, count), stop - 1, -1)
        else:
            numbers = [page(part)]
        result.update((number, None) for number in numbers if number <= count)
    return list(result)


def compress(numbers):
    """Write ascending page numbers as short as possible."""
    parts = []
    start = previous = None
    for number in [*numbers, None]:
        if None not in (previous, number) and number == previous + 1:
            previous = number
            continue
        if start is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = number
    return ",".join(parts)
