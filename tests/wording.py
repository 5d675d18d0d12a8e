"""The visible texts of a file (comments, docstrings, string literals, pages), and phrases that do not belong there.

Holds: names in code are not looked at, so a test may name a function freely.
Does not: judge style. Each phrase reads like a translation, and has a plain substitute.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.source_code import Source

# The brackets keep this table from being found in this file.
BANNED = {
    r"who[e]ver": "name the person or the part: the client, the owner, another worker",
    r"g[o](?:es|ne)? on|w[e]nt on": "write: continue, keep, is in progress",
    r"(?:is|are|be|was|were|been|being)(?: (?:not|then|also|only|never|always))? t[o]ld(?! (?:apart|from)\b)": "say who says it: the model reads, the log shows",
    r"what (?:came|comes) o[f]": "write: the result, the outcome, how it ended",
    r"a[n]ew": "write: again, from the beginning",
    r"(?<!can\s)(?<!could\s)(?<!may\s)(?<!might\s)(?<!must\s)(?<!should\s)(?<!will\s)(?<!would\s)be i[t]": "write: whether, or, even if",
    r"of its ow[n]": "write: its own X, a separate X",
    r"unaware[s]": "write: by accident, unnoticed",
    r"m[e]nd(?:s|ed|ing)?": "write: fix, repair",
    r"Of tw[o] (?:\w+ ){1,3}(?:that|which)": "put the subject first: When two …",
}
"""Phrase → what to write instead. A space may be a line break."""


_PHRASES = [
    (re.compile(rf"\b(?:{phrase})\b".replace(" ", r"\s+"), 0 if phrase.startswith("Of") else re.IGNORECASE), fix)
    for phrase, fix in BANNED.items()
]
_CANDIDATE = re.compile("|".join(rf"\b(?:{phrase})\b" for phrase in BANNED).replace(" ", r"\W+"), re.IGNORECASE)
"""Found in every file that holds one of the phrases, wherever its lines and literals are divided; cheap to look for."""
_COMMENT_MARK = re.compile(r"^[ \t]*(?:#+|--+|//+|\*|>)", re.MULTILINE)

Prose = tuple[int, str]
"""The line on which a piece of text begins, and the text."""


def wording(source: Source) -> Iterator[tuple[int, str]]:
    if not _CANDIDATE.search(source.text):
        return
    for start, text in _python_prose(source) if source.path.endswith(".py") else [(1, _unmarked(source.text))]:
        for pattern, fix in _PHRASES:
            for match in pattern.finditer(text):
                phrase = " ".join(match.group().split())
                yield start + text.count("\n", 0, match.start()), f"{phrase!r} is not plain English: {fix}"


def prose_of(source: Source) -> Iterator[Prose]:
    """Yield the docstrings and comments of a module, or the whole text of another file."""
    if not source.path.endswith(".py"):
        yield 1, source.text
        return
    for node in (source.tree, *source.nodes(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        if node.body and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0].lineno, node.body[0].value.value
    yield from _comments(source.text)


def _python_prose(source: Source) -> Iterator[Prose]:
    for node in source.nodes(ast.Constant):
        if isinstance(node.value, str):
            yield node.lineno, node.value
    yield from _comments(source.text)


def _comments(text: str) -> Iterator[Prose]:
    """Yield each block of comments, with lines that follow each other taken together."""
    lines: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] != lines[-1][0] + 1:
            yield lines[0][0], "\n".join(line for _, line in lines)
            lines = []
        lines.append((token.start[0], token.string.lstrip("#")))
    if lines:
        yield lines[0][0], "\n".join(line for _, line in lines)


def _unmarked(text: str) -> str:
    return _COMMENT_MARK.sub("", text)
