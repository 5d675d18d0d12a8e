"""What changed between two lists of lines."""


def changes(base, new):
    """Return (start, end, lines) of each change, in order."""
    result = []
    for at in range(max(len(base), len(new))):
        old = base[at : at + 1]
        lines = new[at : at + 1]
        if old != lines:
            result.append((at, at + 1, lines))
    return result
