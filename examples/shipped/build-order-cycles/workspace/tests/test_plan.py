import unittest

from plan import order


class Order(unittest.TestCase):
    def test_chain(self):
        self.assertEqual(order("a: b\nb: c\nc:\n"), ["c", "b", "a"])
