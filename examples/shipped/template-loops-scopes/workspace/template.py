"""A small template language."""

import re


class Mistake(Exception):
    """The template is wrong."""

    def __init__(self, message, line):
        super().__init__(f"line {line}: {message}")
        self.line = line


FOR = re.compile(r"\{% for (\w+) in (\w+) %\}(.*?)\{% end %\}", re.DOTALL)
IF = re.compile(r"\{% if (\w+) %\}(.*?)(?:\{% else %\}(.*?))?\{% end %\}", re.DOTALL)
NAME = re.compile(r"\{\{ (\w+) \}\}")


def render(text, values):
    """Return the text with all tags replaced."""

    def loop(found):
        result = ""
        for item in values[found[2]]:
            values[found[1]] = item
            result += render(found[3], values)
        return result

    def test(found):
        return render(found[2] if values.get(found[1]) else found[3] or "", values)

    text = FOR.sub(loop, text)
    text = IF.sub(test, text)
    return NAME.sub(lambda found: str(values[found[1]]), text)
