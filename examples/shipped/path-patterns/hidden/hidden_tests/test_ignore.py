import faulthandler
import unittest

from ignore import Rules

faulthandler.dump_traceback_later(9, exit=True)


class Ignore(unittest.TestCase):
    def check(self, text, yes=(), no=()):
        rules = Rules(text)
        for path in yes:
            self.assertTrue(rules.ignored(path), f"{text!r} should match {path!r}")
        for path in no:
            self.assertFalse(rules.ignored(path), f"{text!r} should not match {path!r}")

    def test_depth(self):
        self.check("*.log", ["a.log", "x/y/a.log", ".log", "x.log/", "x.log/y"], ["a.logs", "alog", "log"])
        self.check("/a", ["a", "a/", "a/b"], ["b/a", "ab"])
        self.check("doc/*.txt", ["doc/a.txt"], ["x/doc/a.txt", "doc/x/a.txt", "doc/"])
        self.check("a?c", ["abc", "x/abc"], ["a/c", "ac"])

    def test_two_stars(self):
        self.check("**/foo", ["foo", "a/foo", "a/b/foo", "foo/x"], ["afoo", "a/bfoo"])
        self.check("**/a/b", ["a/b", "x/y/a/b"], ["xa/b"])
        self.check("abc/**", ["abc/x", "abc/x/y", "abc/x/"], ["abc/", "abc", "x/abc/y"])
        self.check("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["ab", "a/xb", "ax/b", "z/a/b"])
        self.check("a/**/**/b", ["a/b", "a/x/b"], ["ab"])
        self.check("x**y", ["xy", "xaby", "d/xay"], ["xa/by"])
        self.check("a/x**y", ["a/x1y"], ["a/x/y"])
        self.check("**", ["a", "a/b"])

    def test_folders(self):
        self.check("build/", ["build/", "x/build/", "build/a", "x/build/a/b"], ["build", "x/build"])
        self.check("/out/", ["out/", "out/a"], ["x/out/", "out"])
        self.check("a/b/", ["a/b/", "a/b/c"], ["x/a/b/"])

    def test_take_back(self):
        self.check("*.log\n!keep.log", ["a.log"], ["keep.log", "x/keep.log"])
        self.check("!keep.log\n*.log", ["keep.log"])
        self.check("*.log\n!keep.log\n/top/keep.log", ["top/keep.log"], ["keep.log"])
        self.check("build/\n!build/keep", ["build/keep"])
        self.check("build/*\n!build/keep", ["build/x"], ["build/keep", "build/"])
        self.check("a/\n!a/", [], ["a/", "a/b"])
        self.check("*\n!*/\n!*.py", ["a.c", "d/a.c"], ["a.py", "d/a.py", "d/"])

    def test_sets(self):
        self.check("[a-c]x", ["ax", "cx"], ["dx", "x", "-x"])
        self.check("[!a-c]x", ["dx", "d/ex"], ["ax", "x"])
        self.check("[^a-c]x", ["dx"], ["ax"])
        self.check("[]x]1", ["]1", "x1"], ["[1"])
        self.check("[!]]1", ["x1"], ["]1"])
        self.check("a[!x]b", ["ayb"], ["a/b"])
        self.check("a[+-0]b", ["a-b"], ["a/b"])
        self.check("[ab", ["[ab"], ["a"])
        self.check("[a-]1", ["a1", "-1"], ["b1"])
        self.check("[.^]1", [".1", "^1"], ["x1"])
        self.check("[[a]1", ["[1", "a1"])
        self.check("[a&&b]1", ["&1"])

    def test_escapes(self):
        self.check("\\!x\n\\#y\n\\*z", ["!x", "#y", "*z"], ["x", "az"])
        self.check("a\\[b]", ["a[b]"], ["ab"])
        self.check("[\\]]1", ["]1"], ["\\1"])
        self.check("a  \nb\\ \n  c", ["a", "b ", "  c"], ["a  ", "b", "c"])
        self.check("# no\n\n   \n", [], ["# no", "", " ", "a"])

    def test_plain(self):
        self.check("a.b", ["a.b"], ["axb"])
        self.check("(a|b)+$", ["(a|b)+$"], ["a"])
        self.check("*.log", [], ["a.log\n"])
        self.check("a*c", ["a\nc"])

    def test_quick(self):
        self.check("a*a*a*a*a*a*a*a*a*a*b", [], ["a" * 200])
        self.check("**/a/**/a/**/a/**/a/**/a/b", [], ["a/" * 60 + "c"])
