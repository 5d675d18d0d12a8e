import json
import os
import tempfile
import unittest
import zlib
from unittest import mock

from store import Damaged, Store


def record(change):
    data = json.dumps(change).encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


class Stores(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "log")

    def write(self, data):
        with open(self.path, "wb") as file:
            file.write(data)

    def data(self):
        with open(self.path, "rb") as file:
            return file.read()

    def open(self):
        store = Store(self.path)
        self.addCleanup(store.close)
        return store

    def content(self):
        store = Store(self.path)
        try:
            return {key: store.get(key) for key in store.keys()}
        finally:
            store.close()

    def test_old_logs_and_deletion(self):
        self.write(record({"set": ["a", "1"]}) + record({"set": ["b", "2"]}) + record({"delete": "a"}))
        self.assertEqual(self.content(), {"b": "2"})
        store = self.open()
        store.delete("b")
        self.assertEqual(self.content(), {})
        with self.assertRaises(KeyError):
            store.delete("b")

    def test_every_cut(self):
        whole = record({"set": ["a", "1"]}) + record({"set": ["b", "é\n2"]})
        first = len(record({"set": ["a", "1"]}))
        for end in range(len(whole)):
            self.write(whole[:end])
            store = Store(self.path)
            store.set("c", "3")
            store.close()
            expected = {"c": "3"} | ({"a": "1"} if end >= first else {})
            self.assertEqual(self.content(), expected, end)

    def test_damaged_last_line(self):
        good = record({"set": ["a", "1"]})
        for tail in (b"\x00" * 20, b"garbage\n", record({"set": ["b", "2"]}).replace(b"2", b"3"), b"zzzzzzzz {}\n", b"\n", b"\xff\xff \n"):
            self.write(good + tail)
            self.assertEqual(self.content(), {"a": "1"}, tail)

    def test_damaged_middle(self):
        bad = record({"set": ["a", "1"]}) + b"garbage\n" + record({"set": ["b", "2"]})
        self.write(bad)
        with self.assertRaises(Damaged):
            Store(self.path)
        self.assertEqual(self.data(), bad)

    def test_odd_texts(self):
        texts = {"line\nfeed\r\n": "\u2028\x00é", "": "", "日本": "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")}
        store = self.open()
        for key, value in texts.items():
            store.set(key, value)
        self.assertEqual(self.content(), texts)

    def test_batch_is_whole(self):
        store = self.open()
        store.set("a", "1")
        before = len(self.data())
        with store.batch():
            store.set("b", "2")
            store.set("c", "x")
            store.delete("a")
            store.set("c", "3")
            self.assertEqual((store.get("c"), store.get("a"), store.keys()), ("3", None, ["b", "c"]))
        whole = self.data()
        self.assertEqual(self.content(), {"b": "2", "c": "3"})
        for end in range(before, len(whole)):
            self.write(whole[:end])
            self.assertEqual(self.content(), {"a": "1"}, end)

    def test_batch_that_fails(self):
        store = self.open()
        store.set("a", "1")
        with self.assertRaises(ZeroDivisionError):
            with store.batch():
                store.set("b", "2")
                store.delete("a")
                1 / 0
        self.assertEqual((store.get("a"), store.keys()), ("1", ["a"]))
        store.set("d", "4")
        self.assertEqual(self.content(), {"a": "1", "d": "4"})

    def test_nested(self):
        store = self.open()
        with store.batch():
            with self.assertRaises(RuntimeError):
                with store.batch():
                    pass
        with store.batch():
            store.set("a", "1")
        self.assertEqual(self.content(), {"a": "1"})

    def test_compact(self):
        store = self.open()
        for n in range(50):
            store.set("a", str(n))
        store.set("b", "1")
        store.delete("b")
        size = len(self.data())
        store.compact()
        self.assertLess(len(self.data()), size / 10)
        store.set("c", "3")
        self.assertEqual(self.content(), {"a": "49", "c": "3"})
        self.assertFalse(os.path.exists(self.path + ".new"))

    def test_crash_while_compacting(self):
        store = self.open()
        store.set("a", "1")
        with mock.patch("os.replace", side_effect=OSError("crash")), mock.patch("os.rename", side_effect=OSError("crash")):
            with self.assertRaises(OSError):
                store.compact()
        self.assertEqual(self.content(), {"a": "1"})

    def test_left_over(self):
        self.write(record({"set": ["a", "1"]}))
        with open(self.path + ".new", "wb") as file:
            file.write(record({"set": ["z", "1"]}))
        self.assertEqual(self.content(), {"a": "1"})
        self.assertFalse(os.path.exists(self.path + ".new"))
