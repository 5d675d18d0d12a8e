import unittest

from billing import bill, split


class Split(unittest.TestCase):
    def test_even(self):
        self.assertEqual(split(900, [1, 1, 1]), [300, 300, 300])

    def test_names(self):
        self.assertEqual(bill(300, {"ann": 1, "bo": 2}), {"ann": "1.00", "bo": "2.00"})

    def test_nobody(self):
        with self.assertRaises(ValueError):
            split(1, [])
