"""Splitting formulas."""

import re

TOKEN = re.compile(
    r"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)|(?P<name>[A-Za-z_][A-Za-z_0-9]*)|(?P<sign>[<>=!]=|.)",
    re.DOTALL,
)


class Mistake(Exception):
    """The formula is wrong at some column."""

    def __init__(self, message, column):
        super().__init__(f"{message} (column {column})")
        self.column = column


def tokens(text):
    """Return (kind, text, column) of each piece."""
    result = []
    for found in TOKEN.finditer(text):
        if not found[0].isspace():
            result.append((found.lastgroup, found[0], found.start() + 1))
    result.append(("end", "", len(text) + 1))
    return result
