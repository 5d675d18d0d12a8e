import unittest

from pages import expand


class Expand(unittest.TestCase):
    def test_single_pages(self):
        self.assertEqual(expand("4,2", 10), [4, 2])
