"""Reading configuration files."""

import re

QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?')
SECTION = re.compile(r"\[([^\]]*)\]\s*(?:#.*)?")
ESCAPES = {'\\"': '"', "\\\\": "\\", "\\n": "\n", "\\t": "\t"}


def value_of(text):
    """Return the value that stands after the equals sign."""
    text = text.strip()
    if text.startswith('"'):
        quoted = QUOTED.fullmatch(text)
        if not quoted:
            raise ValueError("a quote is not closed, or text follows")
        return re.sub(r"\\.", lambda found: ESCAPES.get(found[0], found[0]), quoted[1])
    if re.match(r"#(?![^\W_])", text):
        return ""
    return re.split(r"\s#", text)[0].strip()


def load(text):
    """Return the sections of the text: names with their keys and values."""
    sections = {}
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = SECTION.fullmatch(line)
            if not section:
                raise ValueError(f"line {number}: not a section")
            current = section[1].strip()
            sections.setdefault(current, {})
            continue
        key, equals, value = line.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"line {number}: neither a section nor a key with a value")
        try:
            sections.setdefault(current, {})[key.strip()] = value_of(value)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return sections
