import subprocess
import unittest


def run(text, column="price"):
    return subprocess.run(["awk", "-v", f"column={column}", "-f", "stats.awk"], input=text, capture_output=True, text=True, timeout=5)


def stats(*cells):
    return run("id\tprice\tmore\n" + "".join(f"x\t{cell}\ty\n" for cell in cells)).stdout.split("\n")[:-1]


def expected(count, low, median, high, mean):
    return [f"count: {count}", f"min: {low}", f"median: {median}", f"max: {high}", f"mean: {mean}"]


class Stats(unittest.TestCase):
    def test_negative(self):
        self.assertEqual(stats(-3, -1, -2), expected(3, -3, -2, -1, -2))

    def test_positive(self):
        self.assertEqual(stats(4, 1, 2), expected(3, 1, 2, 4, 2.33333))

    def test_as_numbers(self):
        self.assertEqual(stats(9, 10, 100), expected(3, 9, 10, 100, 39.6667))

    def test_even(self):
        self.assertEqual(stats(10, 1, 4, 3), expected(4, 1, 3.5, 10, 4.5))

    def test_single(self):
        self.assertEqual(stats(7), expected(1, 7, 7, 7, 7))

    def test_empty_cells(self):
        self.assertEqual(stats("", 5, " ", 7), expected(2, 5, 6, 7, 6))
        self.assertEqual(run("a\tb\tprice\n\t\t4\n1\t\t6\n1\n").stdout.split("\n")[0], "count: 2")

    def test_not_numbers(self):
        self.assertEqual(stats("n/a", 1, "0x1A", "1.2.3", "nan", "inf", "1e", ".", "-", "1 2"), [*expected(1, 1, 1, 1, 1), "skipped: 9"])

    def test_forms(self):
        self.assertEqual(stats("+1.5", ".5", "1e3", " 2 ", "-1.E-1"), expected(5, -0.1, 1.5, 1000, 200.78))

    def test_nothing(self):
        self.assertEqual(stats(), ["count: 0"])
        self.assertEqual(stats("x", ""), ["count: 0", "skipped: 1"])

    def test_windows_and_names(self):
        self.assertEqual(run("id\tunit price\r\n1\t5\r\n2\tx\r\n", "unit price").stdout.split("\n"),
                         [*expected(1, 5, 5, 5, 5), "skipped: 1", ""])

    def test_unknown(self):
        for text in ("a\tb\n1\t2\n", "a\n", ""):
            done = run(text)
            self.assertEqual((done.returncode, done.stdout, done.stderr.strip()), (2, "", "no column: price"))

    def test_many(self):
        lines = stats(*[(n * 7919) % 20011 for n in range(20011)])
        self.assertEqual(lines, expected(20011, 0, 10005, 20010, 10005))
