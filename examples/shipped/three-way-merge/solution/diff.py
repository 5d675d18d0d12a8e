"""What changed between two lists of lines."""

from difflib import SequenceMatcher


def changes(base, new):
    """Return (start, end, lines) of each change, in order."""
    matcher = SequenceMatcher(None, base, new, autojunk=False)
    return [(a, b, new[c:d]) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal"]
