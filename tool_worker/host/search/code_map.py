"""The map of a workspace's code: directories, files, classes and functions, and their dependencies.

The name of an entity is its path, `shop/till.py`, or its path and qualified name, `shop/till.py:Till.open`.

Holds: only changed files are parsed again. References are resolved only if the syntax is clear (names of the file,
imports, `self`), so every dependency in the map is real, but some are missing. No code of the files is run; a file that
cannot be parsed is reported and has no definitions.
"""

from __future__ import annotations

import ast
import os

from tool_worker.host.search.code_files import Stamp, list_code_files, text_of

MAX_HOPS = 8
"""Maximum number of imports that the lookup of a name follows."""

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
ROOT = "."
Edge = tuple[str, str]
"""The kind of the dependency, and the entity at its other end."""


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


class ImportTarget:
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
        self.imports: dict[str, ImportTarget] = {}
        self.bases: dict[str, list[str]] = {}
        self.calls: list[tuple[str, str]] = []
        self.problem = ""


def parse_file(text: str) -> ParsedFile:
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
            called = to_dotted_name(child.func)
            if called:
                found.calls.append((owner, called))
        elif isinstance(child, ast.Import):
            for alias in child.names:
                # `import a.b` binds `a`; the rest is looked up from there.
                module = alias.name if alias.asname else alias.name.partition(".")[0]
                found.imports[alias.asname or module] = ImportTarget(module, 0)
                if "." in alias.name:
                    found.imports.setdefault(alias.name, ImportTarget(alias.name, 0))
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                imported = ImportTarget(child.module or "", child.level, alias.name)
                found.imports[alias.asname or alias.name] = imported
        _walk(found, child, inner)


def _define(found: ParsedFile, node: Scope, name: str) -> None:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    found.entities.setdefault(name, Entity(name, kind, first, node.lineno, node.end_lineno or node.lineno))
    if isinstance(node, ast.ClassDef):
        bases = (to_dotted_name(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases)
        found.bases[name] = [base for base in bases if base]


def to_dotted_name(node: ast.expr) -> str:
    """Return a dotted name such as `a.b.c`; empty for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


class CodeMap:
    """The map of the files below one directory.

    Attributes:
        is_cut: Whether some files are missing in the map, because there are too many.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.files: dict[str, Stamp] = {}
        self.is_cut = False
        self._parsed: dict[str, ParsedFile] = {}
        self._modules: dict[str, list[str]] = {}
        self._downstream: dict[str, list[Edge]] = {}
        self._upstream: dict[str, list[Edge]] = {}

    def refresh(self) -> None:
        """Parse the files that have changed since the last call."""
        files, self.is_cut = list_code_files(self.root)
        changed = [path for path, stamp in files.items() if self.files.get(path) != stamp]
        if not changed and len(files) == len(self.files):
            return
        self._parsed = {path: known for path, known in self._parsed.items() if path in files}
        for path in changed:
            if path.endswith(".py"):
                text = text_of(self.root, path)
                self._parsed[path] = parse_file(text) if text is not None else ParsedFile()
        self.files = files
        self._link()

    def kind_of(self, name: str) -> str:
        """Return `directory`, `file`, `class` or `function`; empty if it does not exist."""
        path, _, inner = name.partition(":")
        if inner:
            entity = self.entity(name)
            return entity.kind if entity else ""
        if path in self.files:
            return "file"
        return "directory" if path in self._downstream else ""

    def entity(self, name: str) -> Entity | None:
        """Return a class or function."""
        path, _, inner = name.partition(":")
        known = self._parsed.get(path)
        return known.entities.get(inner) if known else None

    def entities_of(self, path: str) -> list[Entity]:
        """Return the definitions of a file in the order of its lines."""
        known = self._parsed.get(path)
        return sorted(known.entities.values(), key=lambda entity: entity.first) if known else []

    def problem_of(self, path: str) -> str:
        """Return why a file could not be parsed; empty if it could."""
        known = self._parsed.get(path)
        return known.problem if known else ""

    def find_enclosing(self, path: str, line: int) -> Entity | None:
        """Return the innermost class or function that contains a line."""
        around = [entity for entity in self.entities_of(path) if entity.first <= line <= entity.last]
        return min(around, key=lambda entity: entity.last - entity.first, default=None)

    def find_entities(self, words: str) -> list[str]:
        """Return the entities that these words may refer to, best match first."""
        wanted = words.strip().removeprefix("./").rstrip("/").removesuffix("()") or ROOT
        if self.kind_of(wanted):
            return [wanted]
        last = wanted.rpartition(":")[2]
        everything = [f"{path}:{inner}" for path, known in sorted(self._parsed.items()) for inner in known.entities]
        for matches in (
            [path for path in self.files if path.endswith(f"/{wanted}")],
            [name for name in everything if name.endswith((f":{last}", f".{last}"))],
            [name for name in everything if name.rpartition(":")[2].rpartition(".")[2].lower() == last.lower()],
        ):
            if matches:
                return matches
        return []

    def edges(self, name: str, *, is_upstream: bool) -> list[Edge]:
        """Return the dependencies and members of an entity; with `is_upstream`, its dependents and its container."""
        return (self._upstream if is_upstream else self._downstream).get(name, [])

    def _link(self) -> None:
        """Resolve all references."""
        self._modules = {}
        for path in self._parsed:
            steps = path.removesuffix(".py").removesuffix("/__init__").split("/")
            for position in range(len(steps)):
                self._modules.setdefault(".".join(steps[position:]), []).append(path)
        edges: dict[tuple[str, str, str], None] = {}
        for path in self.files:
            steps = [ROOT, *os.path.dirname(path).split("/")] if "/" in path else [ROOT]
            folders = [ROOT, *("/".join(steps[1 : end + 1]) for end in range(1, len(steps)))]
            for outer, inner in zip(folders, [*folders[1:], path], strict=True):
                edges[outer, "contains", inner] = None
            known = self._parsed.get(path)
            if known is not None:
                for edge in self._edges_of(path, known):
                    edges[edge] = None
        self._downstream = {ROOT: []}
        self._upstream = {}
        for source, how, target in edges:
            self._downstream.setdefault(source, []).append((how, target))
            self._upstream.setdefault(target, []).append((how, source))

    def _edges_of(self, path: str, known: ParsedFile) -> list[tuple[str, str, str]]:
        edges = []
        for entity in self.entities_of(path):
            outer = entity.name.rpartition(".")[0]
            edges.append((f"{path}:{outer}" if outer else path, "contains", f"{path}:{entity.name}"))
        for imported in known.imports.values():
            target = self._resolve_import(path, imported, MAX_HOPS)
            if target and target != path:
                edges.append((path, "imports", target))
        references = [(owner, "invokes", called) for owner, called in known.calls]
        references += [(name, "inherits", base) for name, bases in known.bases.items() for base in bases]
        for owner, how, words in references:
            # The bases of a class are resolved in the scope around it, not inside it.
            target = self._resolve_name(
                path, known, owner if how == "invokes" else owner.rpartition(".")[0], words, MAX_HOPS
            )
            source = f"{path}:{owner}" if owner else path
            if target and target != source:
                edges.append((source, how, target))
        return edges

    def _resolve_name(self, path: str, known: ParsedFile, owner: str, words: str, hops: int) -> str:
        """Return the entity that a name refers to at its place of use; empty if unknown."""
        first, _, rest = words.partition(".")
        if first in ("self", "cls"):
            holder = owner
            while holder and known.entities[holder].kind != "class":
                holder = holder.rpartition(".")[0]
            return self._resolve_member(f"{path}:{holder}", rest, hops) if holder and rest and "." not in rest else ""
        scope = owner
        while True:
            inner = f"{scope}.{first}" if scope else first
            is_visible = not scope or known.entities[scope].kind == "function"
            if is_visible and inner in known.entities:
                return self._resolve_member(f"{path}:{inner}", rest, hops)
            if not scope:
                break
            scope = scope.rpartition(".")[0]
        return self._resolve_attribute(path, words, hops)

    def _resolve_attribute(self, path: str, words: str, hops: int) -> str:
        """Return the entity that an imported name refers to, through modules and classes; empty if unknown."""
        known = self._parsed[path]
        steps = words.split(".")
        for length in range(len(steps), 0, -1):
            imported = known.imports.get(".".join(steps[:length]))
            if imported is not None and hops > 0:
                return self._resolve_member(
                    self._resolve_import(path, imported, hops - 1), ".".join(steps[length:]), hops - 1
                )
        return ""

    def _resolve_member(self, holder: str, words: str, hops: int) -> str:
        """Return a member of a file or class by name, including imports and inherited members."""
        if not words or not holder or hops <= 0:
            return holder
        first, _, rest = words.partition(".")
        path, _, inner = holder.partition(":")
        known = self._parsed.get(path)
        if known is None:
            return ""
        name = f"{inner}.{first}" if inner else first
        if name in known.entities:
            return self._resolve_member(f"{path}:{name}", rest, hops - 1)
        if not inner:
            submodule = self._find_module(f"{_module_of(path)}.{first}", near=path)
            return (
                self._resolve_member(submodule, rest, hops - 1)
                if submodule
                else self._resolve_attribute(path, words, hops - 1)
            )
        for base in known.bases.get(inner, ()):
            found = self._resolve_member(
                self._resolve_name(path, known, inner.rpartition(".")[0], base, hops - 1), words, hops - 1
            )
            if found:
                return found
        return ""

    def _resolve_import(self, path: str, imported: ImportTarget, hops: int) -> str:
        """Return the imported file or entity; empty if it is not part of this workspace."""
        module = imported.module
        if imported.level:
            steps = os.path.dirname(path).split("/") if "/" in path else []
            steps = steps[: len(steps) - imported.level + 1]
            module = ".".join([*steps, *([module] if module else [])])
        whole = self._find_module(f"{module}.{imported.name}", near=path) if imported.name else ""
        file = whole or (self._find_module(module, near=path) if module else "")
        if whole or not file or not imported.name or imported.name == "*":
            return file
        return self._resolve_member(file, imported.name, hops) if hops > 0 else file

    def _find_module(self, module: str, *, near: str) -> str:
        """Return the file of a module: the exact path, else the only candidate, else the one nearest to `near`."""
        found = self._modules.get(module.strip("."), [])
        if len(found) < 2:
            return found[0] if found else ""
        exact = [path for path in found if _module_of(path) == module]
        return exact[0] if exact else max(found, key=lambda path: len(os.path.commonpath([path, near])))


def _module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
