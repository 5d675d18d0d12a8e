"""Reading configuration files."""


def value_of(text):
    """Return the value that stands after the equals sign."""
    text = text.split("#")[0].strip()
    if text.startswith('"') and text.endswith('"'):
        return text[1:-1]
    return text


def load(text):
    """Return the sections of the text: names with their keys and values."""
    sections = {}
    current = ""
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            current = line[1:-1]
            sections[current] = {}
            continue
        key, _, value = line.partition("=")
        sections.setdefault(current, {})[key.strip()] = value_of(value)
    return sections
