import random
import sqlite3
import unittest
from pathlib import Path

SCHEMA = """
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE purchases (id INTEGER PRIMARY KEY, product INTEGER NOT NULL, day TEXT NOT NULL,
    quantity INTEGER NOT NULL, price INTEGER NOT NULL, cancelled INTEGER NOT NULL DEFAULT 0);
CREATE TABLE sales (id INTEGER PRIMARY KEY, product INTEGER NOT NULL, day TEXT NOT NULL,
    quantity INTEGER NOT NULL, price INTEGER NOT NULL);
"""


class Stock(unittest.TestCase):
    def stock(self, products, purchases=(), sales=()):
        connection = sqlite3.connect(":memory:")
        connection.executescript(SCHEMA)
        connection.executemany("INSERT INTO products VALUES (?, 'x')", [(number,) for number in products])
        connection.executemany("INSERT INTO purchases VALUES (?, ?, ?, ?, ?, ?)", purchases)
        connection.executemany("INSERT INTO sales VALUES (?, ?, ?, ?, ?)", sales)
        return [tuple(row) for row in connection.execute(Path("stock.sql").read_text())]

    def test_example(self):
        rows = self.stock([1], [(1, 1, "2026-01-01", 10, 100, 0), (2, 1, "2026-01-02", 10, 200, 0)], [(1, 1, "2026-01-03", 12, 300)])
        self.assertEqual(rows, [(1, 8, 1600, 12 * 300 - 1000 - 400)])

    def test_days_before_ids(self):
        rows = self.stock([1], [(1, 1, "2026-01-05", 5, 100, 0), (2, 1, "2026-01-02", 5, 200, 0), (3, 1, "2026-01-05", 5, 300, 0)],
                          [(1, 1, "2026-01-06", 7, 0)])
        self.assertEqual(rows, [(1, 8, 300 + 1500, -1200)])

    def test_return(self):
        rows = self.stock([1], [(1, 1, "2026-01-01", 5, 100, 0), (2, 1, "2026-01-02", 5, 200, 0)],
                          [(1, 1, "2026-01-03", 7, 300), (2, 1, "2026-01-04", -3, 250)])
        self.assertEqual(rows, [(1, 6, 100 + 1000, 2100 - 750 - 400)])

    def test_cancelled(self):
        rows = self.stock([1], [(1, 1, "2026-01-01", 5, 100, 1), (2, 1, "2026-01-02", 5, 200, 0), (3, 1, "2026-01-09", 5, 999, 1)],
                          [(1, 1, "2026-01-03", 6, 300)])
        self.assertEqual(rows, [(1, -1, 0, 1800 - 1200)])

    def test_too_many(self):
        rows = self.stock([1, 2], [(1, 1, "2026-01-05", 1, 100, 0), (2, 1, "2026-01-02", 1, 50, 0)],
                          [(1, 1, "2026-01-06", 5, 10), (2, 2, "2026-01-06", 5, 10)])
        self.assertEqual(rows, [(1, -3, 0, 50 - 50 - 100 - 300), (2, -5, 0, 50)])

    def test_nothing(self):
        rows = self.stock([3, 1, 2], [(1, 2, "2026-01-05", 2, 100, 0)])
        self.assertEqual(rows, [(1, 0, 0, 0), (2, 2, 200, 0), (3, 0, 0, 0)])

    def test_large(self):
        rows = self.stock([1], [(1, 1, "2026-01-01", 5000000, 3, 0), (2, 1, "2026-01-02", 5000000, 4, 0)], [(1, 1, "2026-01-03", 6000000, 5)])
        self.assertEqual(rows, [(1, 4000000, 16000000, 30000000 - 15000000 - 4000000)])

    def test_random(self):
        chance = random.Random(7)
        for _ in range(30):
            purchases = [(n, chance.choice([1, 2]), f"2026-01-{chance.randrange(1, 20):02}", chance.randrange(1, 9), chance.randrange(100), chance.random() < 0.2)
                         for n in range(1, 12)]
            sales = [(n, chance.choice([1, 2]), "2026-02-01", chance.randrange(1, 8), chance.randrange(100)) for n in range(1, 9)]
            expected = []
            for product in (1, 2):
                good = sorted((row for row in purchases if row[1] == product and not row[5]), key=lambda row: (row[2], row[0]))
                units = [row[4] for row in good for _ in range(row[3])]
                sold = sum(row[3] for row in sales if row[1] == product)
                revenue = sum(row[3] * row[4] for row in sales if row[1] == product)
                missing = max(0, sold - len(units)) * (good[-1][4] if good else 0)
                expected.append((product, len(units) - sold, sum(units[sold:]), revenue - sum(units[:sold]) - missing))
            self.assertEqual(self.stock([1, 2], purchases, sales), expected)
