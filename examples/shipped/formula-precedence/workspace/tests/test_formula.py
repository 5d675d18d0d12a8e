import unittest

from formula import evaluate


class Formula(unittest.TestCase):
    def test_simple(self):
        self.assertEqual(evaluate("2 * (width + 1)", {"width": 3}), 8)
        self.assertEqual(evaluate("1 + 2 * 3"), 7)
