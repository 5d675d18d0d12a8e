import sqlite3
import unittest
from pathlib import Path

SCHEMA = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER NOT NULL, placed TEXT NOT NULL, status TEXT);
CREATE TABLE items (order_id INTEGER NOT NULL, price INTEGER NOT NULL, quantity INTEGER NOT NULL);
CREATE TABLE payments (order_id INTEGER NOT NULL, cents INTEGER NOT NULL);
"""


class Report(unittest.TestCase):
    def setUp(self):
        self.connection = sqlite3.connect(":memory:")
        self.connection.executescript(SCHEMA)
        self.orders = 0

    def customer(self, number, name):
        self.connection.execute("INSERT INTO customers VALUES (?, ?)", (number, name))

    def order(self, customer, placed, items=(), payments=(), status="sent"):
        self.orders += 1
        self.connection.execute("INSERT INTO orders VALUES (?, ?, ?, ?)", (self.orders, customer, placed, status))
        self.connection.executemany("INSERT INTO items VALUES (?, ?, ?)", [(self.orders, *item) for item in items])
        self.connection.executemany("INSERT INTO payments VALUES (?, ?)", [(self.orders, cents) for cents in payments])

    def rows(self, year="2026"):
        return [tuple(row) for row in self.connection.execute(Path("report.sql").read_text(), {"year": year})]

    def test_several_of_both(self):
        self.customer(1, "Ann")
        self.order(1, "2026-03-09 17:20:00", [(100, 1), (50, 2), (5, 3)], [120, 80])
        self.order(1, "2026-03-10 00:00:00", [(100, 1)], [100])
        self.assertEqual(self.rows(), [("Ann", "2026-03", 2, 315, 300, 15)])

    def test_unpaid_and_new(self):
        self.customer(1, "Ann")
        self.order(1, "2026-03-09 17:20:00", [(100, 2)], status=None)
        self.order(1, "2026-04-09 17:20:00", [], [])
        self.assertEqual(self.rows(), [("Ann", "2026-03", 1, 200, 0, 200), ("Ann", "2026-04", 1, 0, 0, 0)])

    def test_without_orders(self):
        self.customer(1, "Zoe")
        self.customer(2, "Bo")
        self.customer(3, "Cy")
        self.order(1, "2025-03-09 17:20:00", [(100, 2)], [5])
        self.order(3, "2026-03-09 17:20:00", [(100, 2)], [5], "cancelled")
        self.assertEqual(self.rows(), [("Bo", None, 0, 0, 0, 0), ("Cy", None, 0, 0, 0, 0), ("Zoe", None, 0, 0, 0, 0)])

    def test_cancelled(self):
        self.customer(1, "Ann")
        self.order(1, "2026-03-09 17:20:00", [(1, 1)], [1])
        self.order(1, "2026-03-09 17:20:00", [(100, 2)], [5], "cancelled")
        self.assertEqual(self.rows(), [("Ann", "2026-03", 1, 1, 1, 0)])

    def test_edges_of_the_year(self):
        self.customer(1, "Ann")
        for placed in ("2025-12-31 23:59:59", "2026-01-01 00:00:00", "2026-12-31 23:59:59", "2027-01-01 00:00:00"):
            self.order(1, placed, [(1, 1)])
        self.assertEqual([(row[1], row[2]) for row in self.rows()], [("2026-01", 1), ("2026-12", 1)])

    def test_same_name(self):
        self.customer(2, "Ann")
        self.customer(1, "Ann")
        self.order(2, "2026-01-05 10:00:00", [(7, 1)])
        self.order(1, "2026-02-05 10:00:00", [(9, 1)])
        self.assertEqual(self.rows(), [("Ann", "2026-02", 1, 9, 0, 9), ("Ann", "2026-01", 1, 7, 0, 7)])
