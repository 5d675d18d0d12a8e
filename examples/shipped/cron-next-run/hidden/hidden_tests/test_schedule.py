import faulthandler
import unittest
from datetime import datetime

from schedule import next_run

faulthandler.dump_traceback_later(8, exit=True)


def after(text, start="2026-11-02 10:00:00"):  # a Monday
    found = next_run(text, datetime.fromisoformat(start))
    return found and found.strftime("%Y-%m-%d %H:%M")


class Due(unittest.TestCase):
    def check(self, cases):
        for text, expected in cases.items():
            with self.subTest(text):
                self.assertEqual(after(text), expected)

    def test_weekdays(self):
        self.check({
            "0 9 * * 1": "2026-11-09 09:00", "0 9 * * 0": "2026-11-08 09:00", "0 9 * * 7": "2026-11-08 09:00",
            "0 9 * * 5-7": "2026-11-06 09:00", "0 11 * * mon": "2026-11-02 11:00", "0 9 * * SAT,tue": "2026-11-03 09:00",
            "0 9 * * 6-7": "2026-11-07 09:00", "0 9 * * fri-sun": "2026-11-06 09:00", "0 9 * * sun-mon": "2026-11-08 09:00",
            "0 9 * * 0-7": "2026-11-03 09:00",
        })

    def test_either_day(self):
        self.check({
            "0 0 13 * 5": "2026-11-06 00:00", "0 0 4 * 5": "2026-11-04 00:00", "0 0 */2 * 5": "2026-11-13 00:00",
            "0 0 3 * */2": "2026-11-03 00:00", "0 0 1 * *": "2026-12-01 00:00", "0 0 30 2 1": "2027-02-01 00:00",
        })

    def test_steps(self):
        self.check({
            "10-20/5 * * * *": "2026-11-02 10:10", "*/15 * * * *": "2026-11-02 10:15", "5/10 9 * * *": "2026-11-03 09:05",
            "1,5-7 10 * * *": "2026-11-02 10:01", "50/5 9,10 * * *": "2026-11-02 10:50", "0 22-23 * * *": "2026-11-02 22:00",
            "0 0 1 JAN-mar/2 *": "2027-01-01 00:00", "59 23 31 12 *": "2026-12-31 23:59",
        })

    def test_strictly_later(self):
        self.assertEqual(after("0 10 * * *"), "2026-11-03 10:00")
        self.assertEqual(after("0 10 * * *", "2026-11-02 09:59:59"), "2026-11-02 10:00")
        self.assertEqual(after("* * * * *", "2026-11-02 10:00:01"), "2026-11-02 10:01")
        self.assertEqual(after("* * * * *", "2026-12-31 23:59:59.999"), "2027-01-01 00:00")
        self.assertEqual(next_run("* * * * *", datetime(2026, 1, 1, 1, 1, 1, 7)), datetime(2026, 1, 1, 1, 2))

    def test_leap_days(self):
        self.assertEqual(after("0 0 29 2 *"), "2028-02-29 00:00")
        self.assertEqual(after("0 0 29 2 *", "2096-02-29 00:00:00"), "2104-02-29 00:00")
        self.assertEqual(after("0 0 31 * *"), "2026-12-31 00:00")
        self.assertEqual(after("15 8 31 4,6,7 *"), "2027-07-31 08:15")

    def test_never(self):
        self.check({"0 0 30 2 *": None, "0 0 31 2,4,6,9,11 *": None})

    def test_names_of_schedules(self):
        self.check({"@hourly": "2026-11-02 11:00", "@daily": "2026-11-03 00:00", "@weekly": "2026-11-08 00:00",
                    "@monthly": "2026-12-01 00:00", "@yearly": "2027-01-01 00:00"})

    def test_refused(self):
        for text in ("60 * * * *", "* 24 * * *", "* * 0 * *", "* * 32 * *", "* * * 13 *", "* * * 0 *", "* * * * 8", "*/0 * * * *",
                     "5-1 * * * *", "* * * *", "* * * * * *", "x * * * *", "1- * * * *", ", * * * *", "mon * * * *", "@never",
                     "-1 * * * *", "1/0 * * * *", "* * * mon *", "1/2/3 * * * *", "1-2-3 * * * *", "* * * * jan", "*-5 * * * *"):
            with self.subTest(text), self.assertRaises(ValueError):
                after(text)
