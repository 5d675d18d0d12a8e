r"""Converts path patterns, in the syntax of `rg -g` and `.gitignore`, to regular expressions.

`*` and `?` match within a name, `**` across directories, `[a-z]` and `[!a-z]` one character, `{a,b}` either word; `\`
escapes the next character. A pattern without a slash matches a name in any directory.

Holds: every other character is literal, including an unclosed bracket or brace.
"""

from __future__ import annotations

import re

_SIGN = re.compile(r"\*\*/|\*\*|\*|\?|\[[!^]?\]?[^\]]{1,200}\]|\\.|.", re.DOTALL)
_MEANINGS = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def path_regex(pattern: str) -> str:
    """Return the regular expression for paths relative to the pattern's directory."""
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
