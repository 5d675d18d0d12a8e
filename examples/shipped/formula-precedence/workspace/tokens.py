"""Splitting formulas."""

import re

TOKEN = re.compile(r"\s*(?:([0-9.]+)|([A-Za-z_]+)|(.))")


class Mistake(Exception):
    """The formula is wrong at some column."""

    def __init__(self, message, column):
        super().__init__(f"{message} (column {column})")
        self.column = column


def tokens(text):
    """Return (kind, text, column) of each piece."""
    result = []
    for found in TOKEN.finditer(text):
        number, name, sign = found.groups()
        kind = "number" if number else "name" if name else "sign"
        result.append((kind, number or name or sign, found.start() + 1))
    result.append(("end", "", len(text) + 1))
    return result
