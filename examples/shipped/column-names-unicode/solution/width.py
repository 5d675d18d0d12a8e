"""How many columns text takes on a terminal."""

import unicodedata


def width(text):
    """Return the number of columns."""
    columns = 0
    for char in text:
        if unicodedata.category(char) in ("Mn", "Me", "Cf"):
            continue
        columns += 2 if unicodedata.east_asian_width(char) in "FW" else 1
    return columns
