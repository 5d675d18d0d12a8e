import subprocess
import unittest


def line(path, status=200, size=10, user="-"):
    return f'10.0.0.1 - {user} [02/Nov/2026:10:00:00 +0100] "GET {path} HTTP/1.1" {status} {size}\n'


def report(text):
    done = subprocess.run(["awk", "-f", "top.awk"], input=text, capture_output=True, text=True, check=True)
    return done.stdout


class Top(unittest.TestCase):
    def test_queries(self):
        self.assertEqual(report(line("/a?x=1") + line("/a") + line("/b?", size="-")), "2\t20\t/a\n1\t0\t/b\n3\t20\ttotal\n")

    def test_failed(self):
        self.assertEqual(report(line("/a", 404) + line("/b", 500) + line("/c", 399)), "1\t10\t/c\n1\t10\ttotal\n")

    def test_user_with_blanks(self):
        self.assertEqual(report(line("/a", user='"Jo Ann Lee"')), "1\t10\t/a\n1\t10\ttotal\n")

    def test_user_that_looks_like_a_request(self):
        self.assertEqual(report(line("/a", user='"GET /x y"')), "1\t10\t/a\n1\t10\ttotal\n")

    def test_ties_and_numbers(self):
        text = "".join(line("/many") for _ in range(10)) + line("/z") * 2 + line("/k") * 2 + line("/B")
        self.assertEqual(report(text), "10\t100\t/many\n2\t20\t/k\n2\t20\t/z\n1\t10\t/B\n15\t150\ttotal\n")

    def test_noise(self):
        self.assertEqual(report("\nhello world\n" + line("/a")), "1\t10\t/a\n1\t10\ttotal\n")

    def test_nothing(self):
        self.assertEqual(report(""), "0\t0\ttotal\n")
