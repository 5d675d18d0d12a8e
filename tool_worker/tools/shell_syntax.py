"""How many commands a text holds, by parsing it as bash (OpenHands 10.3, step 2).

Holds: here-documents, comments and continued lines stay with their command; a list joined by `;`, `&` or `&&` is one;
what cannot be parsed counts as one, and bash itself will say what is wrong with it.
"""

from __future__ import annotations

from functools import cache

import tree_sitter
import tree_sitter_bash

JOINING = (";", "&")


def top_level_commands(text: str) -> list[str]:
    """Return the commands of a text, those on lines of their own apart."""
    source = text.encode("utf-8", "replace")
    root = _parser().parse(source).root_node
    if root.has_error:
        return [text]
    groups: list[list[tree_sitter.Node]] = []
    is_joined = False
    for node in root.children:
        if not node.is_named:
            is_joined = is_joined or node.type in JOINING
        elif node.type != "comment":
            if groups and is_joined:
                groups[-1].append(node)
            else:
                groups.append([node])
            is_joined = False
    return [source[group[0].start_byte : group[-1].end_byte].decode("utf-8", "replace").strip() for group in groups]


@cache
def _parser() -> tree_sitter.Parser:
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
