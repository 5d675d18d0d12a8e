"""Reading CSV that arrives in pieces."""

START, PLAIN, QUOTED, CLOSED = range(4)


class Reader:
    """Turn pieces of text into rows."""

    def __init__(self, delimiter=","):
        self.delimiter = delimiter
        self.state = START
        self.cells = []
        self.cell = []
        self.first = True

    def feed(self, piece):
        """Return the rows which the piece completes."""
        done = []
        for char in piece:
            if self.first:
                self.first = False
                if char == "\ufeff":
                    continue
            if self.state == QUOTED:
                if char == '"':
                    self.state = CLOSED
                else:
                    self.cell.append(char)
            elif char in "\r\n":
                done += self.end_row()
            elif char == self.delimiter:
                self.end_cell()
                self.state = START
            elif char == '"' and self.state == START:
                self.state = QUOTED
                # an empty cell in quotes makes a row, an empty line does not
            elif char == '"' and self.state == CLOSED:
                self.cell.append(char)
                self.state = QUOTED
            elif self.state == CLOSED:
                raise ValueError("text after a closing quote")
            else:
                self.cell.append(char)
                self.state = PLAIN
        return done

    def close(self):
        """Return the rows which only the end completes."""
        if self.state == QUOTED:
            raise ValueError("a quote is not closed")
        return self.end_row()

    def end_cell(self):
        self.cells.append("".join(self.cell))
        self.cell = []

    def end_row(self):
        if self.state == START and not self.cells:
            return []
        self.end_cell()
        self.state = START
        row, self.cells = self.cells, []
        return [row]


def rows(pieces, delimiter=","):
    """Yield all rows of the pieces."""
    reader = Reader(delimiter)
    for piece in pieces:
        yield from reader.feed(piece)
    yield from reader.close()
