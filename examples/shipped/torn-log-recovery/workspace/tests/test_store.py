import os
import tempfile
import unittest

from store import Store


class Simple(unittest.TestCase):
    def test_reopen(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "log")
            store = Store(path)
            store.set("a", "1")
            store.close()
            again = Store(path)
            self.assertEqual(again.get("a"), "1")
            again.close()
