"""Rows of text as columns for the terminal."""

from width import width


def cell(value, limit):
    """Return the text of a cell."""
    text = "" if value is None else str(value)
    if limit is not None and width(text) > limit:
        kept = ""
        for char in text:
            if width(kept + char) > limit - 1:
                break
            kept += char
        text = kept + "…"
    return text


def table(rows, limit=None):
    """Return the rows as lines, with columns of equal width."""
    count = max((len(row) for row in rows), default=0)
    full = [[*row, *[None] * (count - len(row))] for row in rows]
    texts = [[cell(value, limit) for value in row] for row in full]
    widths = [max(width(text) for text in column) for column in zip(*texts)]
    lines = []
    for values, row in zip(full, texts):
        parts = []
        for value, text, columns in zip(values, row, widths):
            blanks = " " * (columns - width(text))
            parts.append(blanks + text if isinstance(value, (int, float)) else text + blanks)
        lines.append("  ".join(parts).rstrip(" "))
    return "\n".join(lines)
