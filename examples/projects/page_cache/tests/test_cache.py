import unittest

from page_cache.cache import PageCache


def filled(*paths):
    cache = PageCache(limit_bytes=30)
    for path in paths:
        cache.put(path, b"0123456789")
    return cache


class PageCacheTest(unittest.TestCase):
    def test_serves_what_was_put(self):
        cache = filled("/a")
        self.assertEqual(cache.get("/a"), b"0123456789")
        self.assertIsNone(cache.get("/b"))
        self.assertEqual(cache.statistics.hit_rate, 0.5)

    def test_drops_the_oldest_page_for_a_new_one(self):
        cache = filled("/a", "/b", "/c", "/d")
        self.assertEqual([path for path in ("/a", "/b", "/c", "/d") if cache.peek(path)], ["/b", "/c", "/d"])
        self.assertEqual(cache.statistics.evictions, 1)

    def test_keeps_the_page_that_is_used(self):
        cache = filled("/a", "/b", "/c")
        cache.get("/a")
        cache.put("/d", b"0123456789")
        self.assertIsNotNone(cache.peek("/a"))
        self.assertIsNone(cache.peek("/b"))

    def test_looking_is_not_using(self):
        cache = filled("/a", "/b", "/c")
        cache.peek("/a")
        cache.put("/d", b"0123456789")
        self.assertIsNone(cache.peek("/a"))

    def test_a_page_that_is_too_large_is_not_kept(self):
        cache = filled("/a")
        self.assertEqual(cache.put("/big", b"x" * 31), b"x" * 31)
        self.assertEqual((cache.peek("/big"), len(cache)), (None, 1))

    def test_invalidates_a_page_and_those_below(self):
        cache = filled("/docs", "/docs/intro", "/docs-old")
        self.assertEqual(cache.invalidate("/docs"), 2)
        self.assertIsNotNone(cache.peek("/docs-old"))
