import unittest

from formula import Mistake, evaluate


class Values(unittest.TestCase):
    def check(self, cases, names=None):
        for text, value in cases.items():
            with self.subTest(text):
                self.assertAlmostEqual(evaluate(text, names), value)

    def test_signs_and_powers(self):
        self.check({"-2 ^ 2": -4, "2 ^ -1": 0.5, "2 ^ 3 ^ 2": 512, "(-2) ^ 2": 4, "--2": 2, "2 - -2": 4, "-2 ^ -2": -0.25,
                    "2 ^ -1 ^ 2": 0.5, "2 * -3": -6, "-2 * -3 ^ 2": 18})

    def test_left_to_right(self):
        self.check({"10 - 4 - 3": 3, "100 / 10 / 5": 2, "2 * 3 % 4": 2, "7 - 2 + 1": 6, "8 / 4 * 2": 4})

    def test_remainder(self):
        self.check({"7 % -3": 1, "-7 % 3": -1, "-7 % -3": -1, "7.5 % 2": 1.5})

    def test_comparisons(self):
        self.check({"1 < 2": 1, "2<=1": 0, "1 + 1 == 2": 1, "1 != 1": 0, "3 >= 3": 1, "2 > 1 + 1": 0, "(1 < 2) < 3": 1})

    def test_logic(self):
        self.check({"1 < 2 and not 3 > 4 or x": 1, "not 0 and 0": 0, "0 or 1 and 0": 0, "not 1 == 2": 1, "2 and 3": 1,
                    "0 and 1 / 0": 0, "1 or 1 / 0": 1, "0 and nobody": 0, "not not 5": 1, "0 or 7": 1, "1 or 0 and 1 / 0": 1})

    def test_numbers(self):
        self.check({"1.5e3": 1500, ".5": 0.5, "2.": 2, "1E-2": 0.01, "e1 + 1": 6}, {"e1": 5})

    def test_functions(self):
        self.check({"max(1, 2, 3)": 3, "min(4)": 4, "abs(-2) ^ 2": 4, "if(1 < 2, 5, 1 / 0)": 5, "if(0, nobody, 6)": 6,
                    "max(if(1, 2, 3), 1 + 0) - 1": 1, "order + android + notes": 6}, {"order": 1, "android": 2, "notes": 3})

    def test_zero(self):
        for text in ("1 / 0", "1 % 0"):
            with self.assertRaises(ZeroDivisionError):
                evaluate(text)


class Mistakes(unittest.TestCase):
    def test_columns(self):
        for text, column in {
            "": 1, "1 +": 4, "  1 + * 2": 7, "(1": 3, "1)": 2, "1 2": 3, "1 < 2 < 3": 7, "a + nobody": 5, "2a": 2,
            "1 $ 2": 3, "abs(1, 2)": 1, "1 + if(1, 2)": 5, "max()": 1, "max(1,)": 7, "1 == 2 != 3": 8,
            "and": 1, "0 and (1": 9, "if(0, 1 +, 2)": 10, "0 and abs(1, 2)": 7, "(1]": 3, "1 = 2": 3, "+ 1": 1,
            "1 or": 5, "not": 4, "abs": 1, "1 + ": 5,
        }.items():
            with self.subTest(text), self.assertRaises(Mistake) as caught:
                evaluate(text, {"a": 1})
            with self.subTest(text):
                self.assertEqual(caught.exception.column, column)

    def test_numbers(self):
        for text in ("1.2.3", ".", "1..2", "2width"):
            with self.subTest(text), self.assertRaises(Mistake):
                evaluate(text, {"width": 1})
