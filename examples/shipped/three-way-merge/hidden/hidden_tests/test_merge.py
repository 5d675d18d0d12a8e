import unittest

from merge import merge


def conflict(mine, theirs):
    return ["<<<<<<< mine", *mine, "=======", *theirs, ">>>>>>> theirs"]


class Merge(unittest.TestCase):
    def check(self, base, mine, theirs, expected, conflicts=0):
        self.assertEqual(merge(list(base), list(mine), list(theirs)), (list(expected), conflicts))
        if not conflicts:
            self.assertEqual(merge(list(base), list(theirs), list(mine)), (list(expected), 0))

    def test_apart(self):
        self.check("abcdefg", "0abcdefg", "abcdeXg", "0abcdeXg")
        self.check("abcdefg", "acdefg", "abcdef", "acdef")
        self.check("abcdef", "abXYcdef", "abcdZ", "abXYcdZ")

    def test_same_change(self):
        self.check("abcd", "aXd", "aXd", "aXd")
        self.check("abcd", "abcd9", "abcd9", "abcd9")
        self.check("abcd", "0abcd", "0abcZ", "0abcZ")

    def test_neighbours(self):
        self.check("abcd", "aXcd", "abYd", "aXYd")
        self.check("abcd", "acd", "abYd", "aYd")
        self.check("abcd", "acd", "abd", "ad")

    def test_insertion_beside_a_change(self):
        self.check("abcd", "a1bcd", "aXcd", "a1Xcd")
        self.check("abcd", "ab1cd", "aXcd", "aX1cd")
        self.check("abcd", "ab1cd", "acd", "a1cd")
        self.check("abcd", "abcd1", "abc", "abc1")
        self.check("abcd", "1abcd", "bcd", "1bcd")

    def test_insertion_inside(self):
        self.check("abcd", "ab1cd", "ad", ["a", *conflict("b1c", ""), "d"], 1)
        self.check("abcd", "ab1cd", "aXd", ["a", *conflict("b1c", "X"), "d"], 1)

    def test_two_insertions(self):
        self.check("ab", "a1b", "a2b", ["a", *conflict("1", "2"), "b"], 1)
        self.check("", "1", "2", conflict("1", "2"), 1)

    def test_different_changes(self):
        self.check("abc", "aXc", "aYc", ["a", *conflict("X", "Y"), "c"], 1)
        self.check("abc", "ac", "aYc", ["a", *conflict("", "Y"), "c"], 1)
        self.check("abcde", "aXe", "abYde", ["a", *conflict("X", "bYd"), "e"], 1)

    def test_chain(self):
        self.check("abcdefg", "aXXYYfg", "abZZefg", ["a", *conflict("XXYY", "bZZe"), "f", "g"], 1)

    def test_two_conflicts(self):
        self.check("abcde", "XbcdY", "1bcd2", [*conflict("X", "1"), "b", "c", "d", *conflict("Y", "2")], 2)

    def test_conflict_and_the_rest(self):
        self.check("abcdefgh", "0abXdefgh", "abYdefg", ["0", "a", "b", *conflict("X", "Y"), "d", "e", "f", "g"], 1)

    def test_large(self):
        base = [str(n) for n in range(2000)]
        mine = ["top", *base]
        theirs = [*base[:1000], "middle", *base[1001:]]
        self.assertEqual(merge(base, mine, theirs), (["top", *theirs], 0))

    def test_arguments_stay(self):
        base, mine, theirs = list("abc"), list("abX"), list("Ybc")
        merge(base, mine, theirs)
        self.assertEqual((base, mine, theirs), (list("abc"), list("abX"), list("Ybc")))
