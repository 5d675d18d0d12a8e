"""The fields of a schedule."""

MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
WEEKDAYS = "sun mon tue wed thu fri sat".split()


def number(text, first, last, names):
    """Return the number that stands there, or that a name stands for."""
    value = names[text.lower()] if text.lower() in names else int(text) if text.isdecimal() else -1
    if not first <= value <= last:
        raise ValueError(f"not a value of this field: {text!r}")
    return value


def parse(text, first, last, names=()):
    """Return the set of values that the field allows."""
    names = {name: first + at for at, name in enumerate(names)}
    values = set()
    for part in text.split(","):
        span, slash, step = part.partition("/")
        if slash and not (step.isdecimal() and int(step)):
            raise ValueError(f"not a step: {part!r}")
        if span == "*":
            start, end = first, last
        elif "-" in span:
            left, right = span.split("-")
            start, end = number(left, first, last, names), number(right, first, last, names)
            if last == 7 and end == 0 and start > 0:
                end = 7
        else:
            start = number(span, first, last, names)
            end = last if slash else start
        if end < start:
            raise ValueError(f"a backward range: {part!r}")
        values.update(range(start, end + 1, int(step or 1)))
    return values
