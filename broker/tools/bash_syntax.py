"""The syntax tree of a text in bash.

Holds: no text ends the process. The grammar's own scanner looks characters up in a table of the C library, and beyond
its end with those of high planes; for bash all of them are parts of words, so one that is none of them stands in.
"""

from __future__ import annotations

import re
from functools import cache

import tree_sitter
import tree_sitter_bash

_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_STAND_IN = "\x7f"
MAX_PIPES = 2_000
"""The parser takes the square of their number: ten thousand would hold up a worker, and all its work, for minutes."""


def parsed(text: str) -> tree_sitter.Node | None:
    """Return the root of the tree; positions in it are those of the text's characters.

    Texts of nodes have a DEL for each character beyond ASCII: what is compared with them is ASCII.

    Returns:
        None where there are more than `MAX_PIPES`.
    """
    if text.count("|") > MAX_PIPES:
        return None
    return _parser().parse(_BEYOND_ASCII.sub(_STAND_IN, text).encode()).root_node


@cache
def _parser() -> tree_sitter.Parser:
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
