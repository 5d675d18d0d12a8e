import unittest

from pages import compress, expand


class Expand(unittest.TestCase):
    def test_good(self):
        for text, pages in {
            "1-3,5": [1, 2, 3, 5], "8-": [8, 9, 10], "-2": [1, 2], "5,1-3": [5, 1, 2, 3], "1-3,2": [1, 2, 3],
            "3-1": [3, 2, 1], "9-12": [9, 10], "12-9": [10, 9], "11": [], "11-": [], "2,9-,2": [2, 9, 10],
            " 1 - 2 , 4 ": [1, 2, 4], "5-5": [5], "-99": list(range(1, 11)),
        }.items():
            with self.subTest(text):
                self.assertEqual(list(expand(text, 10)), pages)

    def test_a_huge_range_is_quick(self):
        self.assertEqual(list(expand("2-999999999999", 3)), [2, 3])

    def test_bad(self):
        for text in ("0", "a", "1-2-3", "-", "", "1,,2", "0-3", "1-a", "3-0", "1,"):
            with self.subTest(text), self.assertRaises(ValueError):
                list(expand(text, 10))


class Compress(unittest.TestCase):
    def test_runs(self):
        self.assertEqual(compress([1, 2, 3, 5]), "1-3,5")
        self.assertEqual(compress([1, 2]), "1-2")
        self.assertEqual(compress([1, 3, 4, 5]), "1,3-5")
        self.assertEqual(compress([]), "")
