"""How many commands a text holds, by parsing it as bash (OpenHands 10.3, step 2).

Holds: here-documents, comments and continued lines stay with their command; a list joined by `;`, `&` or `&&` is one;
what cannot be parsed counts as one, and bash itself will say what is wrong with it.
"""

from __future__ import annotations

import tree_sitter

from broker.tools.bash_syntax import parsed

JOINING = (";", "&")


def top_level_commands(text: str) -> list[str]:
    """Return the commands of a text, split where they stand on separate lines."""
    root = parsed(text)
    if root is None or root.has_error:
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
    return [text[group[0].start_byte : group[-1].end_byte].strip() for group in groups]
