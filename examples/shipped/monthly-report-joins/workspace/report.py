"""Print the report of an example."""

import sqlite3
from pathlib import Path


def report(connection, year):
    """Return the rows of the report."""
    return connection.execute(Path("report.sql").read_text(), {"year": year}).fetchall()


if __name__ == "__main__":
    connection = sqlite3.connect(":memory:")
    connection.executescript(Path("schema.sql").read_text())
    connection.execute("INSERT INTO customers VALUES (1, 'Ann')")
    connection.execute("INSERT INTO orders VALUES (1, 1, '2026-03-09 17:20:00', 'sent')")
    connection.executemany("INSERT INTO items VALUES (1, ?, ?)", [(100, 1), (50, 2)])
    connection.executemany("INSERT INTO payments VALUES (1, ?)", [(120,), (80,)])
    for row in report(connection, "2026"):
        print(*row)
