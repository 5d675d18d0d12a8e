"""Parses bash into a syntax tree.

Holds: no text crashes the process. The grammar's own scanner looks characters up in a table of the C library, and reads
beyond its end for characters of high planes. Bash treats all characters beyond ASCII as parts of words, so each is
replaced by one ASCII character before parsing.
"""

from __future__ import annotations

import re
from functools import cache

import tree_sitter
import tree_sitter_bash

_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_STAND_IN = "\x7f"
MAX_PIPES = 2_000
"""The parser takes quadratic time in the number of pipes: ten thousand would block a worker for minutes."""


def parse_bash(text: str) -> tree_sitter.Node | None:
    """Return the root of the tree. Its positions count the characters of the text.

    In the texts of nodes, DEL replaces each character beyond ASCII; callers compare these texts only with ASCII.

    Returns:
        None if there are more than `MAX_PIPES` pipes.
    """
    if text.count("|") > MAX_PIPES:
        return None
    return _load_parser().parse(_BEYOND_ASCII.sub(_STAND_IN, text).encode()).root_node


@cache
def _load_parser() -> tree_sitter.Parser:
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
