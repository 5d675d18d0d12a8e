import unittest
from datetime import datetime

from schedule import next_run


class Schedule(unittest.TestCase):
    def test_daily(self):
        self.assertEqual(next_run("30 4 * * *", datetime(2026, 11, 2, 5, 0)), datetime(2026, 11, 3, 4, 30))
