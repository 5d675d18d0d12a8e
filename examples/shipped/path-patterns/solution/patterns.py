"""Matching patterns, piece by piece."""

ANY = "*"
ONE = "?"
FOLDERS = "**"


class Set:
    """Characters in brackets."""

    def __init__(self, negative, ranges):
        self.negative = negative
        self.ranges = ranges

    def matches(self, char):
        return self.negative != any(first <= char <= last for first, last in self.ranges)


def read_set(text, at):
    """Return the set that begins after a bracket and the place after it, or None."""
    negative = text[at : at + 1] in ("!", "^") and at < len(text)
    at += negative
    chars = []
    while at < len(text):
        if text[at] == "]" and chars:
            break
        plain = text[at] == "\\" and at + 1 < len(text)
        at += plain
        chars.append((text[at], plain))
        at += 1
    else:
        return None
    ranges = []
    k = 0
    while k < len(chars):
        if k + 2 < len(chars) and chars[k + 1] == ("-", False):
            ranges.append((chars[k][0], chars[k + 2][0]))
            k += 3
        else:
            ranges.append((chars[k][0], chars[k][0]))
            k += 1
    return Set(negative, ranges), at + 1


def compile_segment(text):
    """Return the pieces of a pattern without slashes: kinds, sets and (char,)."""
    pieces = []
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char == "\\" and at < len(text):
            pieces.append((text[at],))
            at += 1
        elif char == "*":
            pieces.append(ANY)
        elif char == "?":
            pieces.append(ONE)
        elif char == "[" and (found := read_set(text, at)):
            pieces.append(found[0])
            at = found[1]
        else:
            pieces.append((char,))
    return pieces


def matches(pieces, items, many, one):
    """Whether the pieces match all items; many marks a piece for any number of items."""
    states = {0}
    for item in [*items, None]:
        for at in sorted(states):
            while at < len(pieces) and pieces[at] == many:
                at += 1
                states.add(at)
        if item is None:
            return len(pieces) in states
        states = {
            at + (pieces[at] != many)
            for at in states
            if at < len(pieces) and (pieces[at] == many or one(pieces[at], item))
        }
    return False


def one_char(piece, char):
    if piece == ONE:
        return True
    return piece.matches(char) if isinstance(piece, Set) else piece == (char,)


def one_name(pieces, name):
    return matches(pieces, name, ANY, one_char)


def compile_path(pattern):
    """Return the pieces of a whole pattern, a list of names."""
    anchored = "/" in pattern
    names = pattern.removeprefix("/").split("/")
    pieces = [FOLDERS if name == "**" else compile_segment(name) for name in names]
    if not anchored:
        pieces = [FOLDERS, [ANY] if pieces == [FOLDERS] else pieces[0]]
    elif pieces[-1] == FOLDERS:
        pieces.append([ANY])
    return pieces


def match_path(pieces, names):
    return matches(pieces, names, FOLDERS, one_name)
