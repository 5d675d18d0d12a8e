import unittest
from datetime import date

from billing import dates, prorate
from months import add_months, days_in


def short(days):
    return [day.strftime("%y%m%d") for day in days]


class Dates(unittest.TestCase):
    def test_month_ends(self):
        self.assertEqual(short(dates(date(2026, 1, 31), 1, 5)), ["260131", "260228", "260331", "260430", "260531"])
        self.assertEqual(short(dates(date(2027, 12, 30), 1, 4)), ["271230", "280130", "280229", "280330"])

    def test_leap_day(self):
        self.assertEqual(short(dates(date(2024, 2, 29), 12, 5)), ["240229", "250228", "260228", "270228", "280229"])

    def test_quarters(self):
        self.assertEqual(short(dates(date(2026, 10, 31), 3, 4)), ["261031", "270131", "270430", "270731"])

    def test_other_lengths(self):
        self.assertEqual(short(dates(date(2026, 8, 31), 18, 3)), ["260831", "280229", "290831"])
        self.assertEqual(short(dates(date(2026, 12, 1), 1, 2)), ["261201", "270101"])
        self.assertEqual(dates(date(2026, 12, 1), 1, 0), [])

    def test_centuries(self):
        self.assertEqual([days_in(year, 2) for year in (1900, 2000, 2100, 2024)], [28, 29, 28, 29])

    def test_back(self):
        self.assertEqual(add_months(date(2026, 3, 31), -1), date(2026, 2, 28))
        self.assertEqual(add_months(date(2026, 1, 31), -2), date(2025, 11, 30))


class Prorate(unittest.TestCase):
    def test_part(self):
        self.assertEqual(prorate(3100, date(2026, 1, 1), 1, date(2026, 1, 31)), 100)
        self.assertEqual(prorate(2800, date(2026, 1, 31), 1, date(2026, 2, 27)), 100)

    def test_on_a_billing_date(self):
        self.assertEqual(prorate(3100, date(2026, 1, 1), 1, date(2026, 1, 1)), 3100)
        self.assertEqual(prorate(999, date(2026, 1, 31), 1, date(2026, 3, 31)), 999)

    def test_no_drift(self):
        # from 28 February to 30 March are 31 days
        self.assertEqual(prorate(3100, date(2026, 1, 31), 1, date(2026, 3, 30)), 100)

    def test_half_a_cent(self):
        self.assertEqual(prorate(1, date(2026, 4, 1), 1, date(2026, 4, 16)), 1)
        self.assertEqual(prorate(5, date(2026, 4, 1), 1, date(2026, 4, 16)), 3)
        self.assertEqual(prorate(10**17 * 2 + 1, date(2026, 4, 1), 1, date(2026, 4, 16)), 10**17 + 1)
