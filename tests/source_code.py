"""Tracked files as syntax trees with their imported names resolved: the input of the house rules.

Holds: a `Source` depends on its path and text alone, so a rule can be tried on any snippet.
Does not: follow assignments or attributes of values; only names that an import binds are resolved.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True)
class Import:
    """One imported name: dotted and absolute (`from os import environ` imports `os.environ`)."""

    name: str
    bound_as: str
    bound_to: str
    line: int
    is_late: bool
    """Inside a function or under `if TYPE_CHECKING`: nothing is loaded when the module is."""

    @property
    def library(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Source:
    """One file: its path from the root of the repository, with slashes, and its text."""

    path: str
    text: str

    @property
    def package(self) -> str:
        return PurePosixPath(self.path).parts[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @property
    def imports(self) -> tuple[Import, ...]:
        return self._walked[0]

    @cached_property
    def _bindings(self) -> dict[str, str]:
        return {imported.bound_as: imported.bound_to for imported in self.imports if imported.bound_as}

    def resolve(self, node: ast.AST) -> str:
        """Return the dotted name of an expression, or "" if no import binds its root."""
        if isinstance(node, ast.Name):
            return self._bindings.get(node.id, "")
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return ""

    def nodes(self, *types: type[ast.AST]) -> Iterator[ast.AST]:
        """Every node of these types, in no particular order."""
        return (node for kind, found in self._walked[1].items() if issubclass(kind, types) for node in found)

    @cached_property
    def _walked(self) -> tuple[tuple[Import, ...], dict[type[ast.AST], list[ast.AST]]]:
        """Return the imports, in order, and the nodes by type; walked once, because there are twenty rules."""
        imports: list[Import] = []
        found: dict[type[ast.AST], list[ast.AST]] = {}
        waiting: list[tuple[ast.AST, bool]] = [(self.tree, False)]
        while waiting:
            node, is_late = waiting.pop()
            found.setdefault(type(node), []).append(node)
            imports += self._imports_of(node, is_late=is_late)
            is_late = is_late or isinstance(node, Function | ast.Lambda) or _is_type_checking(node)
            waiting += [(child, is_late) for child in reversed([*ast.iter_child_nodes(node)])]
        return tuple(imports), found

    def public_definitions(self) -> Iterator[Definition]:
        """Functions and classes of the module, and the methods of its public classes, without a leading underscore."""
        return _public_below(self.tree)

    def _imports_of(self, node: ast.AST, *, is_late: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                bound_to = alias.name if alias.asname else root
                yield Import(alias.name, alias.asname or root, bound_to, node.lineno, is_late)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{self._absolute(node)}.{alias.name}"
                yield Import(name, alias.asname or alias.name, name, node.lineno, is_late)
        elif isinstance(node, ast.Call) and (name := _dynamic_import(node)):
            yield Import(name, "", "", node.lineno, is_late)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        folders = PurePosixPath(self.path).parts[:-1]
        above = folders[: len(folders) - (node.level - 1)]
        return ".".join([*above, *([node.module] if node.module else [])])


@cache
def tracked_sources() -> tuple[Source, ...]:
    """Read every tracked text file that is in the working tree, by path."""
    # Another user may own the checkout in CI; git refuses to list it unless told that the folder is meant.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    paths = sorted(path for path in listing.split("\0") if path and (ROOT / path).is_file())
    return tuple(Source(path, text) for path in paths if (text := _read_text(ROOT / path)) is not None)


def decorator_names(node: Definition) -> set[str]:
    """The last part of each decorator's name: `typing.overload` and `overload` are both `overload`."""
    return {ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in node.decorator_list}


def _public_below(parent: ast.AST) -> Iterator[Definition]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, Definition):
            if not node.name.startswith("_"):
                yield node
                if isinstance(node, ast.ClassDef):
                    yield from _public_below(node)
        elif isinstance(node, ast.If | ast.Try):
            yield from _public_below(node)


def _dynamic_import(call: ast.Call) -> str:
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    is_import = called in {"import_module", "__import__"}
    if is_import and call.args and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str):
        return call.args[0].value
    return ""


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING"


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
