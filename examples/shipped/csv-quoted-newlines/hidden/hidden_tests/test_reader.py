import unittest

from reader import Reader, rows

GOOD = {
    "a,b\nc,d": [["a", "b"], ["c", "d"]],
    'a,"x\ny"\nb,"1,2"\n': [["a", "x\ny"], ["b", "1,2"]],
    '"say ""hi""",""""\n': [['say "hi"', '"']],
    "a,b\r\nc\rd\n\re": [["a", "b"], ["c"], ["d"], ["e"]],
    '"a\r\nb\r"\r\nc': [["a\r\nb\r"], ["c"]],
    ' "a" ,b"c"d\n': [[' "a" ', 'b"c"d']],
    '\n\n""\n\r\n,\n': [[""], ["", ""]],
    "\ufeffa\n\ufeffb\n": [["a"], ["\ufeffb"]],
    '\ufeff"a"\n': [["a"]],
    "": [],
    '""': [[""]],
    'a,""': [["a", ""]],
    "a,": [["a", ""]],
    '"","",x\n': [["", "", "x"]],
}
BAD = ('"a', 'x\n"a""', '"a"b,c', '"a" ,c', '"a""b')


class Reading(unittest.TestCase):
    def test_whole(self):
        for text, expected in GOOD.items():
            with self.subTest(text):
                self.assertEqual(list(rows([text])), expected)

    def test_single_characters(self):
        for text, expected in GOOD.items():
            with self.subTest(text):
                self.assertEqual(list(rows(text)), expected)

    def test_every_cut(self):
        for text, expected in GOOD.items():
            for at in range(len(text)):
                with self.subTest(text, at=at):
                    self.assertEqual(list(rows([text[:at], "", text[at:]])), expected)

    def test_bad(self):
        for text in BAD:
            for pieces in ([text], text):
                with self.subTest(text), self.assertRaises(ValueError):
                    list(rows(pieces))

    def test_delimiter(self):
        self.assertEqual(list(rows(['a,b;"c;d"'], ";")), [["a,b", "c;d"]])

    def test_rows_come_early(self):
        reader = Reader()
        self.assertEqual(reader.feed('a\nb,"c'), [["a"]])
        self.assertEqual(reader.feed('"\nd'), [["b", "c"]])
        self.assertEqual(reader.close(), [["d"]])

    def test_large(self):
        text = "x" * 200000
        self.assertEqual(list(rows(['"'] + [text[:50]] * 4000 + ['"'])), [[text]])
