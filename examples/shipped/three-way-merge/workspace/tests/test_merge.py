import unittest

from merge import merge


class Merge(unittest.TestCase):
    def test_one_side(self):
        self.assertEqual(merge(list("abc"), list("axc"), list("abc")), (list("axc"), 0))
