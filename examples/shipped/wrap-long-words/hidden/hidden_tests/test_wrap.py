import unittest

from letters import wrap


class Wrap(unittest.TestCase):
    def test_paragraphs(self):
        self.assertEqual(wrap("one two\nthree\n\n \t\n\nfour", 20), "one two three\n\nfour")

    def test_edges(self):
        self.assertEqual(wrap("\n\n a b \n\n", 10), "a b")
        self.assertEqual(wrap(" \n ", 10), "")

    def test_long_word_first(self):
        self.assertEqual(wrap("abcdefgh ij", 5), "abcde\nfgh\nij")
        self.assertEqual(wrap("abcdefgh i", 5), "abcde\nfgh i")

    def test_long_word_later(self):
        self.assertEqual(wrap("a abcdefghijk b", 5), "a\nabcde\nfghij\nk b")

    def test_exact_multiple(self):
        self.assertEqual(wrap("abcdefghij x", 5), "abcde\nfghij\nx")

    def test_exact_width(self):
        self.assertEqual(wrap("ab cd ef", 5), "ab cd\nef")

    def test_width_one(self):
        self.assertEqual(wrap("abc d", 1), "a\nb\nc\nd")
