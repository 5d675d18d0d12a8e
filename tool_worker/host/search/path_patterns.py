r"""Patterns of paths, as `rg -g` and `.gitignore` have them, as regular expressions.

`*` and `?` match within a name, `**` over directories, `[a-z]` and `[!a-z]` one character, `{a,b}` either; `\` takes
the next character as it is. A pattern without a slash is that of a name in any directory.

Holds: every other character stands for itself, also a bracket or a brace that is never closed.
"""

from __future__ import annotations

import re

_SIGN = re.compile(r"\*\*/|\*\*|\*|\?|\[[!^]?\]?[^\]]{1,200}\]|\\.|.", re.DOTALL)
_MEANINGS = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def path_regex(pattern: str) -> str:
    """Return the regular expression of the paths below the directory that the pattern is for."""
    signs = _SIGN.findall(pattern.removeprefix("/"))
    expression = "" if "/" in pattern else _MEANINGS["**/"]
    depth, closing = 0, signs.count("}")
    for sign in signs:
        closing -= sign == "}"
        if sign == "{" and closing > depth:
            depth += 1
            expression += "("
        elif sign == "}" and depth:
            depth -= 1
            expression += ")"
        elif sign == "," and depth:
            expression += "|"
        elif sign in _MEANINGS:
            expression += _MEANINGS[sign]
        elif len(sign) > 2:
            expression += "[^" + sign[2:] if sign[1] == "!" else sign
        else:
            expression += re.escape(sign[-1])
    return expression
