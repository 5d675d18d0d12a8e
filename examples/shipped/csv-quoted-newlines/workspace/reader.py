"""Reading CSV that arrives in pieces."""


class Reader:
    """Turn pieces of text into rows."""

    def __init__(self, delimiter=","):
        self.delimiter = delimiter
        self.rest = ""

    def feed(self, piece):
        """Return the rows which the piece completes."""
        *lines, self.rest = (self.rest + piece).split("\n")
        return [self.row(line) for line in lines if line]

    def close(self):
        """Return the rows which only the end completes."""
        rest, self.rest = self.rest, ""
        return [self.row(rest)] if rest else []

    def row(self, line):
        return [cell.strip('"') for cell in line.split(self.delimiter)]


def rows(pieces, delimiter=","):
    """Yield all rows of the pieces."""
    reader = Reader(delimiter)
    for piece in pieces:
        yield from reader.feed(piece)
    yield from reader.close()
