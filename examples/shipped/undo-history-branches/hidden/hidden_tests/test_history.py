import unittest

from history import History


def typed(text, history=None):
    history = history or History()
    for char in text:
        history.insert(len(history.text), char)
    return history


def states(history):
    result = [history.text]
    while history.undo():
        result.append(history.text)
    return result


class Histories(unittest.TestCase):
    def test_branches(self):
        history = History("a")
        history.insert(0, "x")
        history.insert(0, "y")
        history.undo()
        history.insert(2, "z")
        self.assertFalse(history.redo())
        self.assertEqual(states(history), ["xaz", "xa", "a"])
        while history.redo():
            pass
        self.assertEqual(history.text, "xaz")

    def test_words(self):
        self.assertEqual(states(typed("ab cd\ne")), ["ab cd\ne", "ab cd\n", "ab ", ""])
        self.assertEqual(states(typed("a  b")), ["a  b", "a  ", "a ", ""])

    def test_other_place(self):
        history = typed("ab")
        history.insert(0, "c")
        history.insert(1, "d")
        self.assertEqual(states(history), ["cdab", "ab", ""])

    def test_undo_ends_a_step(self):
        history = typed("ab c")
        history.undo()
        history.redo()
        typed("d", history)
        self.assertEqual(states(history), ["ab cd", "ab c", "ab ", ""])

    def test_delete_keys(self):
        history = History("abcdefgh")
        for at in (2, 2, 2):
            history.delete(at)
        for at in (4, 3):
            history.delete(at)
        self.assertEqual(history.text, "abf")
        self.assertEqual(states(history), ["abf", "abfgh", "abcdefgh"])
        history = History("ab cd ef")
        for at in (5, 4, 3, 3):
            history.delete(at)
        self.assertEqual(states(history), ["ab f", "ab ef", "ab cd ef"])

    def test_long_deletions_stand_alone(self):
        history = History("abcdef")
        history.delete(0, 2)
        history.delete(0)
        history.delete(0)
        self.assertEqual(states(history), ["ef", "cdef", "abcdef"])

    def test_deletion_between(self):
        history = typed("ab")
        history.delete(1)
        typed("c", history)
        self.assertEqual(states(history), ["ac", "a", "ab", ""])

    def test_limit(self):
        history = History("", limit=3)
        typed("a b c d e ", history)
        self.assertEqual(states(history), ["a b c d e ", "a b c d ", "a b c ", "a b "])
        self.assertFalse(history.undo())
        self.assertTrue(history.redo())

    def test_saved(self):
        history = typed("a b ")
        self.assertTrue(history.changed)
        history.saved()
        self.assertFalse(history.changed)
        history.undo()
        self.assertTrue(history.changed)
        history.redo()
        self.assertFalse(history.changed)
        history.undo()
        typed("c", history)
        history.undo()
        self.assertTrue(history.changed)
        history.redo()
        self.assertTrue(history.changed)

    def test_saved_ends_a_step(self):
        history = typed("ab")
        history.saved()
        typed("c", history)
        self.assertTrue(history.changed)
        history.undo()
        self.assertEqual((history.text, history.changed), ("ab", False))

    def test_saved_and_limit(self):
        history = History("", limit=2)
        history.saved()
        typed("a b c ", history)
        self.assertEqual(len(states(history)), 3)
        self.assertTrue(history.changed)
        history = History("", limit=2)
        typed("a b ", history)
        history.saved()
        typed("c ", history)
        history.undo()
        self.assertEqual((history.text, history.changed), ("a b ", False))

    def test_refused(self):
        history = History("abc")
        for call in (lambda: history.insert(4, "x"), lambda: history.insert(-1, "x"), lambda: history.insert(0, ""),
                     lambda: history.delete(3), lambda: history.delete(2, 2), lambda: history.delete(-1), lambda: history.delete(0, 0)):
            with self.assertRaises(ValueError):
                call()
        self.assertEqual((history.text, history.undo(), history.changed), ("abc", False, False))
