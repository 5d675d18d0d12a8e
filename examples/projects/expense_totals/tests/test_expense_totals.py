import unittest

from expense_totals.money import format_cents, parse_cents
from expense_totals.report import render, totals_by_category

REPORT = """\
date,category,amount
2024-03-01,travel,"1,235.00"
2024-03-01,Meals,19.99
2024-03-02,meals,€ 41.31
2024-03-04,travel,19.99
2024-03-05,,(0.50)
"""


class MoneyTest(unittest.TestCase):
    def test_reads_amounts_as_people_write_them(self):
        for text, cents in [("7", 700), (" $1,234.50 ", 123450), ("(12.25)", -1225), ("€ 0.5", 50)]:
            self.assertEqual(parse_cents(text), cents, text)

    def test_reads_every_cent_of_a_euro(self):
        for cents in range(100):
            self.assertEqual(parse_cents(f"19.{cents:02}"), 1900 + cents)

    def test_refuses_what_is_no_amount(self):
        with self.assertRaises((ValueError, ArithmeticError)):
            parse_cents("twelve")

    def test_writes_amounts(self):
        self.assertEqual([format_cents(n) for n in (5, -1230, 123456789)], ["0.05", "-12.30", "1,234,567.89"])


class ReportTest(unittest.TestCase):
    def test_adds_up_by_category(self):
        self.assertEqual(totals_by_category(REPORT.splitlines()), {"meals": 6130, "other": -50, "travel": 125499})

    def test_lays_out_a_table(self):
        self.assertEqual(
            render({"meals": 6130, "travel": 125499}),
            "meals         61.30\ntravel     1,254.99\ntotal      1,316.29",
        )
