import unittest

from settings import load


def value(text):
    return load("k = " + text)[""]["k"]


class Settings(unittest.TestCase):
    def test_example(self):
        self.assertEqual(
            load('[server]\nname = "shop #1"   # shown\ncolour = #ff0000\nport = 8080\n'),
            {"server": {"name": "shop #1", "colour": "#ff0000", "port": "8080"}},
        )

    def test_plain(self):
        for text, expected in {"a#b": "a#b", "a #b": "a", "a # b": "a", "# b": "", "#f00 # red": "#f00", "": "",
                               "a\t#b": "a", "a=b": "a=b", "#": "", 'a "b"': 'a "b"', "a#b c # d": "a#b c"}.items():
            with self.subTest(text):
                self.assertEqual(value(text), expected)

    def test_quoted(self):
        for text, expected in {r'"a\"b"': 'a"b', r'"a\\"': "a\\", r'"\n\t\x"': "\n\t\\x", '""': "", '" a "': " a ",
                               '"a"#b': "a", '"a" # "b"': "a", r'"\\n"': "\\n", '"#"': "#"}.items():
            with self.subTest(text):
                self.assertEqual(value(text), expected)

    def test_sections(self):
        self.assertEqual(load("x=1\n[a]\nk=1\nl=1\n[ b ] # note\n[a]\nk=2\n"),
                         {"": {"x": "1"}, "a": {"k": "2", "l": "1"}, "b": {}})
        self.assertEqual(load("# only this\n\n"), {})

    def test_mistakes(self):
        for text in ("novalue", "[open", 'k = "open', 'k = "a" b', r'k = "a\"', "= 1", "[a] b"):
            with self.subTest(text), self.assertRaisesRegex(ValueError, "line 3"):
                load("a = 1\n\n" + text)
