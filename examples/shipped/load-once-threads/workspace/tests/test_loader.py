import unittest

from loader import Loader


class Simple(unittest.TestCase):
    def test_remembers(self):
        calls = []
        loader = Loader(lambda key: calls.append(key) or key * 2)
        self.assertEqual([loader.get(3), loader.get(3)], [6, 6])
        self.assertEqual(calls, [3])
