import os
import subprocess
import tempfile
import unittest
from datetime import date, timedelta


def run(*words, holidays=None, zone="Europe/Berlin"):
    with tempfile.TemporaryDirectory() as folder:
        if holidays is not None:
            path = os.path.join(folder, "holidays")
            with open(path, "w") as file:
                file.write(holidays)
            words = (*words, path)
        env = {**os.environ, "TZ": zone}
        return subprocess.run(["perl", "due.pl", *words], capture_output=True, text=True, timeout=2, env=env)


def due(*words, **more):
    done = run(*words, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Due(unittest.TestCase):
    def test_weekends(self):
        for start, days, expected in (
            ("2026-11-06", 1, "2026-11-09"), ("2026-11-02", 5, "2026-11-09"), ("2026-11-07", 1, "2026-11-09"),
            ("2026-11-07", -1, "2026-11-06"), ("2026-11-09", -1, "2026-11-06"), ("2026-11-09", -6, "2026-10-30"),
            ("2026-11-07", 0, "2026-11-09"), ("2026-11-09", 0, "2026-11-09"), ("2024-02-28", 1, "2024-02-29"),
            ("2100-02-26", 1, "2100-03-01"),
        ):
            self.assertEqual(due(start, str(days)), expected)

    def test_time_changes(self):
        for zone in ("CET-1CEST,M3.5.0,M10.5.0/3", "<-03>3", "UTC0", "AEST-10AEDT,M10.1.0,M4.1.0/3"):
            self.assertEqual(due("2026-10-23", "2", zone=zone), "2026-10-27")
            self.assertEqual(due("2026-03-27", "2", zone=zone), "2026-03-31")
            self.assertEqual(due("2026-03-31", "-2", zone=zone), "2026-03-27")

    def test_holidays(self):
        text = "# all years\n12-25\n 12-26 # Boxing Day\n\n2026-12-24\n2027-01-01"
        self.assertEqual(due("2026-12-23", "1", holidays=text), "2026-12-28")
        self.assertEqual(due("2027-12-23", "1", holidays=text), "2027-12-24")
        self.assertEqual(due("2027-12-24", "1", holidays=text), "2027-12-27")
        self.assertEqual(due("2026-12-24", "0", holidays=text), "2026-12-28")
        self.assertEqual(due("2027-01-04", "-1", holidays=text), "2026-12-31")
        self.assertEqual(due("2023-02-28", "1", holidays="02-29"), "2023-03-01")
        self.assertEqual(due("2024-02-28", "1", holidays="02-29"), "2024-03-01")

    def test_far(self):
        self.assertEqual(due("2026-11-02", "100000"), str(date(2026, 11, 2) + timedelta(days=140000)))
        self.assertEqual(due("9998-12-31", "1"), "9999-01-01")
        self.assertEqual(due("1900-02-28", "1"), "1900-03-01")

    def test_refused(self):
        for words in (["2026-02-30", "1"], ["2026-13-01", "1"], ["20260101", "1"], ["2026-01-01", "1.5"], ["2026-01-01", "x"],
                      ["2026-01-01"], ["2026-00-10", "1"], ["2100-02-29", "1"]):
            done = run(*words)
            self.assertEqual((done.returncode, done.stdout), (2, ""), words)
            self.assertTrue(done.stderr)
        for text in ("nonsense", "2026-02-30", "13-01", "2026-12-24 x"):
            self.assertEqual(run("2026-01-01", "1", holidays=text).returncode, 2, text)
