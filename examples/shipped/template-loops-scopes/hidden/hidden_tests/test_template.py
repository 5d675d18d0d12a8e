import unittest

from template import Mistake, render


class Render(unittest.TestCase):
    def check(self, text, expected, **values):
        self.assertEqual(render(text, values), expected)

    def test_nested(self):
        self.check("{% for a in rows %}{% for b in a %}{{ b }},{% end %};{% end %}", "1,2,;3,;", rows=[[1, 2], [3]])
        self.check("{% if a %}{% if b %}x{% else %}y{% end %}{% else %}z{% end %}", "y", a=1, b=0)

    def test_scopes(self):
        values = {"x": "out", "l": [1, 2]}
        self.assertEqual(render("{% for x in l %}{% for x in l %}{{ x }}{% end %}{{x}}{% end %}{{ x }}", values), "121122out")
        self.assertEqual(values, {"x": "out", "l": [1, 2]})
        self.check("{% for y in l %}{% end %}[{{ y }}]", "[]", l=[1])

    def test_escapes(self):
        self.check("{{ a }}{{ a | raw }}{{ a | upper }}", "&lt;b&gt;&amp;&quot;&#39;<b>&\"'&lt;B&gt;&amp;&quot;&#39;", a="<b>&\"'")
        self.check("{{ a }}", "{{ b }}{% if %}", a="{{ b }}{% if %}", b=1)

    def test_filters(self):
        self.check('{{ no | default("a|b}}\\"<") }}', 'a|b}}&quot;&lt;')
        self.check('{{ no|default("x<")|upper|raw }}{{ e | default("e") }}{{ z | default("z") }}{{ n | default("n") }}', "X<e0n", e="", z=0, n=None)
        self.check("{{ l | length }}{{ no | length }}{{ s | length }}{{ s | lower }}", "203abc", l=[1, 2], s="AbC")

    def test_paths(self):
        self.check("{{ u.name }}{{ l.1.k }}{{ u.no.no }}{{ l.7 }}{{ u.keys }}{{ n }}{{ s.upper }}{{ f }}", "Annv0", u={"name": "Ann"}, l=[0, {"k": "v"}], n=None, s="s", f=0)

    def test_loop(self):
        self.check("{% for x in l %}{{ loop.index }}{% if loop.first %}F{% end %}{% if loop.last %}L{% end %}{{ x }} {% end %}", "1Fa 2b 3Lc ", l="abc")
        self.check("{% for x in l %}{% for y in l %}{{ loop.outer.index }}{{ loop.index }} {% end %}{% end %}", "11 12 21 22 ", l=[1, 2])
        self.check("{% for x in l %}{{ x }}{% else %}none{% end %}{% for x in no %}{% else %}!{% end %}", "none!", l=[])
        self.check("{% for k, v in d %}{{ k }}={{ v }};{% end %}", "a=1;b=2;", d={"a": 1, "b": 2})
        self.check("{{ loop }}", "own", loop="own")

    def test_if(self):
        text = "{% if not a.b %}1{% elif c %}2{% elif d %}3{% else %}4{% end %}"
        for a, c, d, expected in ((0, 0, 0, "1"), (1, 1, 1, "2"), (1, 0, 1, "3"), (1, 0, 0, "4")):
            self.check(text, expected, a={"b": a}, c=c, d=d)
        self.check("{% if no %}x{% end %}{% if not no %}y{% end %}", "y")

    def test_lines(self):
        self.check("a\n  {% for x in l %}  \n- {{ x }}\n{% end %}\nb\n", "a\n- 1\n- 2\nb\n", l=[1, 2])
        self.check("a\n{# c #}\nb {# d #}\n {# {{ x\n{% end %} #} \nc", "a\nb \nc")
        self.check("{{ x }}\ny {% if x %}\nz{% end %}\n", "1\ny \nz\n", x=1)
        self.check("{% if x %}\nz\n{% end %}", "z\n", x=1)
        self.check("{% if x %}{% end %}\n", "\n", x=1)

    def test_tight(self):
        self.check("{%if a%}{{a}}{%else%}{%end%}{ {a} } {", "1{ {a} } {", a=1)


class Mistakes(unittest.TestCase):
    def test_lines(self):
        for text, line in {
            "a\n{% what %}": 2, "\n\n{{ a | what }}": 3, "{% if a %}\n{% for x in l %}\n": 2, "{% if a %}\n{% end %}\n{% end %}": 3,
            "{% if a %}{% else %}\n{% else %}{% end %}": 2, "{% if a %}{% else %}\n\n{% elif b %}{% end %}": 3, "\n{{ a": 2, "\n{% if a": 2,
            "{# a\n\n": 1, "{# \n #}\n{{ }}": 3, "{% else %}": 1, "{% for x %}{% end %}": 1, "{% for x in l %}\n{% elif a %}{% end %}": 2,
            "{{ a b }}": 1, "{{ a | default }}": 1, "{% if %}{% end %}": 1, "{% if 0 %}\n{% what %}{% end %}": 2, "{{ a |\n upper | x }}": 1,
        }.items():
            with self.subTest(text), self.assertRaises(Mistake) as caught:
                render(text, {"a": 1})
            with self.subTest(text):
                self.assertEqual(caught.exception.line, line)
