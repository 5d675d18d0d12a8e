import unittest

from tables import table
from width import width


class Tables(unittest.TestCase):
    def test_width(self):
        for text, columns in {"": 0, "abc": 3, "e\u0301": 1, "\u00e9": 1, "日本": 4, "\uff21": 2, "\u200b": 0,
                              "Ω": 1, "ｱ": 1, "a\u20dd": 1}.items():
            with self.subTest(text):
                self.assertEqual(width(text), columns)

    def test_columns(self):
        self.assertEqual(table([["日本", "x"], ["Zoe\u0301", "y"], ["ab", "z"]]),
                         "日本  x\nZoe\u0301   y\nab    z")

    def test_no_blanks_at_the_end(self):
        self.assertEqual(table([["a", "long"], ["bb", "s"], ["c", ""]]), "a   long\nbb  s\nc")

    def test_ragged(self):
        self.assertEqual(table([["a"], ["b", "c", "d"], []]), "a\nb  c  d\n")

    def test_numbers(self):
        self.assertEqual(table([["x", 5, "a"], ["y", 120, "b"], ["z", None, "c"], ["w", 1.5, "d"], ["v", "t", "e"]]),
                         "x    5  a\ny  120  b\nz       c\nw  1.5  d\nv  t    e")

    def test_numbers_last(self):
        self.assertEqual(table([["x", 5], ["y", 120]]), "x    5\ny  120")

    def test_limit(self):
        self.assertEqual(table([["abcdef", "x"], ["abc", "y"]], limit=4), "abc…  x\nabc   y")
        self.assertEqual(table([["日本語", "x"]], limit=5), "日本…  x")
        self.assertEqual(table([["日本語", "x"], ["abcd", "y"]], limit=4), "日…   x\nabcd  y")
        self.assertEqual(table([["e\u0301" * 4]], limit=3), "e\u0301e\u0301…")
        self.assertEqual(table([["abc"]], limit=1), "…")

    def test_nothing(self):
        self.assertEqual(table([]), "")
