"""Extracts the definitions and references of a Python file from its syntax.

Holds: no code of the file is run; a file that cannot be parsed is reported and has no definitions.
"""

from __future__ import annotations

import ast

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Entity:
    """A class or function.

    Attributes:
        name: The qualified name, such as `Shop.open`.
        kind: `class` or `function`.
        first, last: Its lines, decorators included, from 1.
        head: The first line after its decorators.
    """

    __slots__ = ("first", "head", "kind", "last", "name")

    def __init__(self, name: str, kind: str, first: int, head: int, last: int) -> None:
        self.name = name
        self.kind = kind
        self.first = first
        self.head = head
        self.last = last


class Imported:
    """The target of an imported name: a module, or a name in one. `level` counts the leading dots."""

    __slots__ = ("level", "module", "name")

    def __init__(self, module: str, level: int, name: str = "") -> None:
        self.module = module
        self.level = level
        self.name = name


class ParsedFile:
    """The definitions and references of one file.

    Attributes:
        imports: Import targets by local name.
        bases: The bases of each class, as written.
        calls: Pairs of the calling entity's name (empty for the file itself) and the called name.
        problem: Why the file could not be parsed; empty if it could.
    """

    def __init__(self) -> None:
        self.entities: dict[str, Entity] = {}
        self.imports: dict[str, Imported] = {}
        self.bases: dict[str, list[str]] = {}
        self.calls: list[tuple[str, str]] = []
        self.problem = ""


def parsed(text: str) -> ParsedFile:
    """Return the definitions and references of a text."""
    found = ParsedFile()
    try:
        _walk(found, ast.parse(text), "")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        found = ParsedFile()
        line = getattr(error, "lineno", None)
        found.problem = f"{type(error).__name__}" + (f" in line {line}" if line else "")
    return found


def _walk(found: ParsedFile, node: ast.AST, owner: str) -> None:
    for child in ast.iter_child_nodes(node):
        inner = owner
        if isinstance(child, Scope):
            inner = f"{owner}.{child.name}" if owner else child.name
            _define(found, child, inner)
        elif isinstance(child, ast.Call):
            called = dotted(child.func)
            if called:
                found.calls.append((owner, called))
        elif isinstance(child, ast.Import):
            for alias in child.names:
                # `import a.b` binds `a`; the rest is looked up from there.
                module = alias.name if alias.asname else alias.name.partition(".")[0]
                found.imports[alias.asname or module] = Imported(module, 0)
                if "." in alias.name:
                    found.imports.setdefault(alias.name, Imported(alias.name, 0))
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                imported = Imported(child.module or "", child.level, alias.name)
                found.imports[alias.asname or alias.name] = imported
        _walk(found, child, inner)


def _define(found: ParsedFile, node: Scope, name: str) -> None:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    found.entities.setdefault(name, Entity(name, kind, first, node.lineno, node.end_lineno or node.lineno))
    if isinstance(node, ast.ClassDef):
        bases = (dotted(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases)
        found.bases[name] = [base for base in bases if base]


def dotted(node: ast.expr) -> str:
    """Return a dotted name such as `a.b.c`; empty for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""
