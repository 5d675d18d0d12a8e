import itertools
import unittest
from datetime import datetime, timezone

from sessions import sessions, summary


def at(hour, minute, second=0, day=2):
    return datetime(2026, 11, day, hour, minute, second, tzinfo=timezone.utc)


def line(hour, minute, user="ann", second=0):
    return f"2026-11-02T{hour:02}:{minute:02}:{second:02}Z {user} /"


class Sessions(unittest.TestCase):
    def test_any_order(self):
        lines = [line(10, 0), line(10, 25), line(10, 50), line(12, 0)]
        expected = [("ann", at(10, 0), at(10, 50), 3), ("ann", at(12, 0), at(12, 0), 1)]
        for order in itertools.permutations(lines):
            self.assertEqual(sessions(order), expected)

    def test_limits(self):
        self.assertEqual(len(sessions([line(10, 0), line(10, 30)])), 1)
        self.assertEqual(len(sessions([line(10, 0), line(10, 30, second=1)])), 2)
        self.assertEqual(len(sessions(["2026-11-02T10:00:00Z a /", "2026-11-03T10:00:01Z a /"])), 2)

    def test_fraction_of_a_second(self):
        self.assertEqual(len(sessions(["2026-11-02T10:00:00Z a /", "2026-11-02T10:30:00.500000Z a /"])), 2)

    def test_offsets(self):
        lines = ["2026-11-02T10:00:00+01:00 a /", "2026-11-02T09:10:00Z a /", "2026-11-02T04:20:00-05:00 a /"]
        self.assertEqual(sessions(lines), [("a", at(9, 0), at(9, 20), 3)])
        self.assertEqual(sessions(lines)[0][1].utcoffset().total_seconds(), 0)

    def test_sorted_by_start(self):
        lines = [line(11, 0, "ann"), line(10, 0, "cy"), line(11, 0, "Bo")]
        self.assertEqual([user for user, *_ in sessions(lines)], ["cy", "Bo", "ann"])

    def test_broken(self):
        lines = ["", "x", "nonsense ann /", "2026-11-02T10:00:00 ann /", "2026-13-02T10:00:00Z ann /", "2026-11-02T10:00:00Z",
                 "2026-11-02T10:00:00Z ann /a b c\n"]
        self.assertEqual(sessions(lines), [("ann", at(10, 0), at(10, 0), 1)])

    def test_summary(self):
        lines = [f"2026-11-{2 + minute // 1440:02}T{minute // 60 % 24:02}:{minute % 60:02}:00Z ann /" for minute in range(0, 1471, 30)]
        self.assertEqual(summary(reversed(lines)), ["ann 88200s 50"])
