"""Rows of text as columns for the terminal."""

from width import width


def cell(value, limit):
    """Return the text of a cell."""
    text = str(value)
    if limit is not None and width(text) > limit:
        text = text[:limit]
    return text


def table(rows, limit=None):
    """Return the rows as lines, with columns of equal width."""
    texts = [[cell(value, limit) for value in row] for row in rows]
    widths = [max(width(text) for text in column) for column in zip(*texts)]
    lines = []
    for row in texts:
        lines.append("  ".join(row[at].ljust(widths[at]) for at in range(len(row))))
    return "\n".join(lines)
