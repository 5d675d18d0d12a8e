import unittest
from datetime import date

from billing import dates


class Dates(unittest.TestCase):
    def test_monthly(self):
        self.assertEqual(dates(date(2026, 1, 5), 1, 2), [date(2026, 1, 5), date(2026, 2, 5)])
