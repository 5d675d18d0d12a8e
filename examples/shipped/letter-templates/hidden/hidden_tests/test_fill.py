import subprocess
import tempfile
import unittest


def fill(values, letter):
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(values)
        file.flush()
        done = subprocess.run(["perl", "fill.pl", file.name], input=letter, capture_output=True, text=True, timeout=5)
    return done.stdout, done.returncode, done.stderr


class Fill(unittest.TestCase):
    def good(self, values, letter, expected):
        self.assertEqual(fill(values, letter), (expected, 0, ""))

    def test_all_of_a_line(self):
        self.good("a = 1\nb=2\n", "{{a}}{{b}} {{a}}\n{{b}}", "12 1\n2")

    def test_equals(self):
        self.good("link = /go?a=b = c\n", "{{link}}", "/go?a=b = c")

    def test_blanks(self):
        self.good("  a  =  x y  \n", "[{{ a }}]", "[x y]")

    def test_values_are_data(self):
        self.good("a = {{b}}\nb = {{a}} $1 \\1\n", "{{a}} {{b}}", "{{b}} {{a}} $1 \\1")

    def test_defaults(self):
        self.good("empty =\nzero = 0\n", "{{x|Dear Customer}}/{{empty|E}}/{{x|}}/{{zero|n}}/{{ x | y }}",
                  "Dear Customer/E//0/y")

    def test_empty_without_default(self):
        self.good("empty =\n", "[{{empty}}]", "[]")

    def test_comments_and_order(self):
        self.good("# a = 0\n\na = 1\na = 2\n", "{{a}}", "2")

    def test_unknown(self):
        self.assertEqual(fill("a = 1\n", "{{z}} {{a}}\n{{ b }} {{z}}\n"),
                         ("{{z}} 1\n{{ b }} {{z}}\n", 1, "unknown: b\nunknown: z\n"))
