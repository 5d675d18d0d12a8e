import unittest

from cache import Cache


class Expiring(unittest.TestCase):
    def setUp(self):
        self.now = 100
        self.cache = Cache(3, 10, clock=lambda: self.now)

    def put(self, keys):
        for key in keys:
            self.cache.put(key, key.upper())

    def kept(self, keys="abcdef"):
        return "".join(key for key in keys if key in self.cache)

    def test_use_keeps(self):
        self.put("abc")
        self.cache.get("a")
        self.put("d")
        self.assertEqual(self.kept(), "acd")

    def test_in_is_no_use(self):
        self.put("abc")
        self.assertIn("a", self.cache)
        self.put("d")
        self.assertEqual(self.kept(), "bcd")

    def test_update_removes_nobody_and_is_a_use(self):
        self.put("abc")
        self.cache.put("a", 2)
        self.assertEqual(self.kept(), "abc")
        self.put("d")
        self.assertEqual(self.kept(), "acd")
        self.assertEqual(self.cache.get("a"), 2)

    def test_expired_go_first(self):
        self.put("a")
        self.now += 5
        self.put("bc")
        self.now += 4
        self.cache.get("a")
        self.now += 1
        self.put("d")
        self.assertEqual(self.kept(), "bcd")

    def test_update_renews(self):
        self.put("a")
        self.now += 6
        self.put("a")
        self.now += 9
        self.assertEqual(self.cache.get("a"), "A")

    def test_reading_does_not_renew(self):
        self.put("a")
        self.now += 9
        self.assertEqual(self.cache.get("a"), "A")
        self.now += 1
        self.assertIsNone(self.cache.get("a"))
        self.assertEqual((len(self.cache), "a" in self.cache), (0, False))

    def test_len(self):
        self.put("a")
        self.now += 5
        self.put("b")
        self.assertEqual(len(self.cache), 2)
        self.now += 5
        self.assertEqual(len(self.cache), 1)

    def test_false_values(self):
        for value in (None, 0, ""):
            self.cache.put("v", value)
            self.assertEqual(self.cache.get("v", "missing"), value)
            self.assertIn("v", self.cache)

    def test_a_miss_changes_nothing(self):
        self.put("abc")
        self.assertEqual(self.cache.get("x", 7), 7)
        self.assertEqual(self.kept("abcx"), "abc")
