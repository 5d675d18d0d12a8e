import unittest

from sessions import sessions


class Sessions(unittest.TestCase):
    def test_one(self):
        found = sessions(["2026-11-02T10:00:00Z ann /", "2026-11-02T10:10:00Z ann /a"])
        self.assertEqual([(user, count) for user, _, _, count in found], [("ann", 2)])
