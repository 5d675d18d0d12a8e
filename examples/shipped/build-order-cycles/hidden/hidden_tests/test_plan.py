import unittest

from plan import Cycle, order


class Order(unittest.TestCase):
    def test_shared(self):
        self.assertEqual(order("app: lib log\nlib: base\nlog: lib\nbase:"), ["base", "lib", "log", "app"])
        self.assertEqual(order("a: b c\nb: d\nc: d\nd:\ne:"), ["d", "b", "c", "a", "e"])

    def test_reader(self):
        self.assertEqual(order("a: b \\\n c # d\n# x: y\n\na: e\nb:"), ["b", "c", "e", "a"])
        self.assertEqual(order(""), [])

    def test_twice_needed(self):
        self.assertEqual(order("a: b b\na: b"), ["b", "a"])

    def test_long_chain(self):
        lines = [f"t{n}: t{n + 1}" for n in range(20000)]
        self.assertEqual(order("\n".join(lines)), [f"t{n}" for n in range(20000, -1, -1)])

    def test_wide(self):
        names = [f"n{n}" for n in range(20000)]
        self.assertEqual(order("all: " + " ".join(names)), [*names, "all"])


class Cycles(unittest.TestCase):
    def path(self, text):
        with self.assertRaises(Cycle) as caught:
            order(text)
        return caught.exception.path

    def test_two(self):
        self.assertEqual(self.path("a: b\nb: a"), ["a", "b", "a"])

    def test_itself(self):
        self.assertEqual(self.path("x:\na: a"), ["a", "a"])

    def test_only_members(self):
        self.assertEqual(self.path("start: x\nx: y\ny: z\nz: x"), ["x", "y", "z", "x"])

    def test_first_in_the_file(self):
        self.assertEqual(self.path("start: z\nx: y\ny: z\nz: x"), ["z", "x", "y", "z"])
        self.assertEqual(self.path("start: q\nx: y\ny: z\nz: x\nq: z"), ["x", "y", "z", "x"])

    def test_long(self):
        lines = [f"t{n}: t{(n + 1) % 5000}" for n in range(5000)]
        self.assertEqual(len(self.path("\n".join(lines))), 5001)
