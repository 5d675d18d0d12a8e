"""Wrapping plain text for mail."""

import sys


def fill(words, width):
    """Return lines of at most width characters, made of the words."""
    lines = []
    line = ""
    for word in words:
        if line and len(line) + 1 + len(word) <= width:
            line += " " + word
        elif not line and len(word) <= width:
            line = word
        else:
            lines.append(line)
            line = word
    if line:
        lines.append(line)
    return lines


def wrap(text, width=72):
    """Wrap all paragraphs of the text."""
    if width < 1:
        raise ValueError("width must be at least 1")
    return "\n".join(fill(text.split(), width))


if __name__ == "__main__":
    print(wrap(sys.stdin.read(), int(sys.argv[1])))
