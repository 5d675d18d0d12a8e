import unittest

from cache import Cache


class Simple(unittest.TestCase):
    def test_put_and_get(self):
        cache = Cache(2, 10)
        cache.put("a", 1)
        self.assertEqual(cache.get("a"), 1)
        self.assertIn("a", cache)
        self.assertEqual(cache.get("b", "nothing"), "nothing")
