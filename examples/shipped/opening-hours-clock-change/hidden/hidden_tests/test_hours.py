import unittest
from datetime import datetime, timezone

from hours import next_open, open_seconds
from zone import Zone

BERLIN = Zone(3600)
DAILY = lambda *spans: [list(spans)] * 7  # noqa: E731


def utc(text):
    return int(datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp())


class Zones(unittest.TestCase):
    def test_changes(self):
        for spring, autumn in (("2026-03-29", "2026-10-25"), ("2027-03-28", "2027-10-31"), ("2024-03-31", "2024-10-27"), ("2100-03-28", "2100-10-31")):
            for zone in (BERLIN, Zone(0), Zone(-3600), Zone(43200)):
                first, last = utc(spring + " 01:00"), utc(autumn + " 01:00")
                offsets = [zone.offset(moment) - zone.standard for moment in (first - 1, first, last - 1, last)]
                self.assertEqual(offsets, [0, 3600, 3600, 0])

    def test_without_summer(self):
        self.assertEqual(Zone(7200, summer=False).offset(utc("2026-07-01 00:00")), 7200)

    def test_new_year(self):
        self.assertEqual(Zone(43200).offset(utc("2026-12-31 23:30")), 43200)
        self.assertEqual(str(Zone(43200).local_date(utc("2026-12-31 12:00"))), "2027-01-01")

    def test_to_utc(self):
        for day, minutes, expected in (
            ((2026, 3, 29), 119, "2026-03-29 00:59"), ((2026, 3, 29), 120, "2026-03-29 01:00"), ((2026, 3, 29), 150, "2026-03-29 01:00"),
            ((2026, 3, 29), 179, "2026-03-29 01:00"), ((2026, 3, 29), 180, "2026-03-29 01:00"), ((2026, 3, 29), 181, "2026-03-29 01:01"),
            ((2026, 10, 25), 119, "2026-10-24 23:59"), ((2026, 10, 25), 120, "2026-10-25 00:00"), ((2026, 10, 25), 179, "2026-10-25 00:59"),
            ((2026, 10, 25), 180, "2026-10-25 02:00"), ((2026, 7, 1), 0, "2026-06-30 22:00"), ((2026, 12, 31), 1440, "2026-12-31 23:00"),
            ((2026, 3, 28), 1440, "2026-03-28 23:00"), ((2026, 3, 29), 1440, "2026-03-29 22:00"),
        ):
            self.assertEqual(BERLIN.to_utc(*day, minutes), utc(expected), (day, minutes))

    def test_change_at_midnight(self):
        azores = Zone(-3600)
        self.assertEqual(azores.to_utc(2026, 3, 29, 30), utc("2026-03-29 01:00"))
        self.assertEqual(azores.to_utc(2026, 10, 25, 0), utc("2026-10-25 00:00"))


class Open(unittest.TestCase):
    def hours(self, week, start, end):
        return open_seconds(BERLIN, week, utc(start), utc(end)) / 3600

    def test_long_and_short_days(self):
        self.assertEqual(self.hours(DAILY((0, 1440)), "2026-03-28 23:00", "2026-03-29 22:00"), 23)
        self.assertEqual(self.hours(DAILY((0, 1440)), "2026-10-24 22:00", "2026-10-25 23:00"), 25)
        self.assertEqual(self.hours(DAILY((60, 240)), "2026-03-28 23:00", "2026-03-29 22:00"), 2)
        self.assertEqual(self.hours(DAILY((60, 240)), "2026-10-24 22:00", "2026-10-25 23:00"), 4)
        self.assertEqual(self.hours(DAILY((130, 170)), "2026-03-28 23:00", "2026-03-29 22:00"), 0)

    def test_over_midnight(self):
        week = [[], [], [], [], [(1320, 120)], [], []]
        self.assertEqual(self.hours(week, "2026-11-02 00:00", "2026-11-09 00:00"), 4)
        self.assertEqual(self.hours(week, "2026-11-07 00:00", "2026-11-07 12:00"), 1)
        saturday = [[], [], [], [], [], [(1320, 240)], []]
        self.assertEqual(self.hours(saturday, "2026-10-24 00:00", "2026-10-26 00:00"), 7)
        self.assertEqual(self.hours(saturday, "2026-03-28 00:00", "2026-03-30 00:00"), 5)

    def test_overlaps(self):
        self.assertEqual(self.hours(DAILY((480, 720), (600, 780), (500, 510)), "2026-11-02 00:00", "2026-11-03 00:00"), 5)
        self.assertEqual(self.hours(DAILY((1200, 600), (540, 660)), "2026-11-02 23:00", "2026-11-03 23:00"), 15)
        self.assertEqual(self.hours(DAILY((0, 1440), (1200, 600)), "2026-11-02 00:00", "2026-11-09 00:00"), 168)

    def test_empty(self):
        self.assertEqual(self.hours(DAILY((600, 600)), "2026-11-02 00:00", "2026-11-09 00:00"), 0)
        self.assertEqual(self.hours(DAILY((0, 1440)), "2026-11-02 12:00", "2026-11-02 12:00"), 0)
        self.assertEqual(self.hours(DAILY((0, 1440)), "2026-11-02 12:00", "2026-11-02 11:00"), 0)


class Next(unittest.TestCase):
    def check(self, week, moment, expected):
        self.assertEqual(next_open(BERLIN, week, utc(moment)), expected and utc(expected))

    def test_next(self):
        week = [[(540, 720), (840, 1080)], [], [], [], [(1320, 120)], [], []]
        self.check(week, "2026-11-02 07:00", "2026-11-02 08:00")
        self.check(week, "2026-11-02 08:30", "2026-11-02 08:30")
        self.check(week, "2026-11-02 11:00", "2026-11-02 13:00")
        self.check(week, "2026-11-02 17:00", "2026-11-06 21:00")
        self.check(week, "2026-11-07 00:59", "2026-11-07 00:59")
        self.check(week, "2026-11-07 01:00", "2026-11-09 08:00")

    def test_same_day_next_week(self):
        self.check([[(540, 720)], [], [], [], [], [], []], "2026-11-02 11:00", "2026-11-09 08:00")

    def test_order(self):
        self.check(DAILY((840, 900), (540, 600)), "2026-11-02 07:00", "2026-11-02 08:00")

    def test_never(self):
        self.check(DAILY(), "2026-11-02 07:00", None)
        self.check(DAILY((5, 5)), "2026-11-02 07:00", None)

    def test_skipped(self):
        sundays = [[], [], [], [], [], [], [(130, 170)]]
        self.check(sundays, "2026-03-22 12:00", "2026-04-05 00:10")
