import unittest

from billing import bill, split


class Split(unittest.TestCase):
    def test_three_people(self):
        self.assertEqual(split(1000, [1, 1, 1]), [334, 333, 333])

    def test_largest_remainder_first(self):
        self.assertEqual(split(100, [1, 1, 1, 4]), [15, 14, 14, 57])
        self.assertEqual(split(10, [1, 5]), [2, 8])

    def test_refund_is_the_mirror(self):
        for cents in range(0, 60):
            for weights in ([1, 1, 1], [3, 0, 4], [2, 5, 6, 1]):
                self.assertEqual(split(-cents, weights), [-share for share in split(cents, weights)])

    def test_sums(self):
        for cents in range(-50, 51):
            for weights in ([1, 1, 1], [7, 0, 3], [1, 2, 3, 4, 5]):
                shares = split(cents, weights)
                self.assertEqual(sum(shares), cents)
                for share, weight in zip(shares, weights):
                    self.assertLess(abs(share * sum(weights) - cents * weight), sum(weights))

    def test_large_amounts_are_exact(self):
        huge = 10**20 + 1
        self.assertEqual(split(huge, [1, 1]), [huge // 2 + 1, huge // 2])

    def test_bill(self):
        self.assertEqual(bill(-100, {"a": 1, "b": 1, "c": 1}), {"a": "-0.34", "b": "-0.33", "c": "-0.33"})
