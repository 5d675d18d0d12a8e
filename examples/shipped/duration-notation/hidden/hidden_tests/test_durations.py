import unittest

from durations import parse, show


class Durations(unittest.TestCase):
    def test_known(self):
        for text, seconds in {"1h30m": 5400, "90s": 90, "2d": 172800, "1h 15m": 4500, "0s": 0, " 1m ": 60}.items():
            self.assertEqual(parse(text), seconds)

    def test_milliseconds(self):
        self.assertAlmostEqual(parse("500ms"), 0.5)
        self.assertAlmostEqual(parse("1m 20ms"), 60.02)
        self.assertAlmostEqual(parse("1m1s500ms"), 61.5)

    def test_fractions(self):
        self.assertAlmostEqual(parse("1.5h"), 5400)
        self.assertAlmostEqual(parse("0.25s"), 0.25)

    def test_refused(self):
        for text in ("", "  ", "90", "h", "5x", "1h30", "1h2h", "5m1h", "1ms1s", "1..5h", "-1h", "1h,2m", "."):
            with self.subTest(text), self.assertRaises(ValueError):
                parse(text)

    def test_show(self):
        for seconds, text in {0: "0s", 0.25: "250ms", 61.5: "1m1s500ms", 90061: "1d1h1m1s", 1.9999: "2s",
                              59.9996: "1m", 0.07: "70ms"}.items():
            self.assertEqual(show(seconds), text)

    def test_there_and_back(self):
        for thousandths in range(0, 200000, 377):
            self.assertAlmostEqual(parse(show(thousandths / 1000)), thousandths / 1000)
