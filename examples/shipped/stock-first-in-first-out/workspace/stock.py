"""Print the stock of an example."""

import sqlite3
from pathlib import Path


def stock(connection):
    """Return the rows of the list."""
    return connection.execute(Path("stock.sql").read_text()).fetchall()


if __name__ == "__main__":
    connection = sqlite3.connect(":memory:")
    connection.executescript(Path("schema.sql").read_text())
    connection.execute("INSERT INTO products VALUES (1, 'Lamp')")
    connection.execute("INSERT INTO purchases VALUES (1, 1, '2026-01-01', 10, 100, 0)")
    connection.execute("INSERT INTO purchases VALUES (2, 1, '2026-01-02', 10, 200, 0)")
    connection.execute("INSERT INTO sales VALUES (1, 1, '2026-01-03', 12, 300)")
    for row in stock(connection):
        print(*row)
