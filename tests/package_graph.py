"""The graph of packages, computed from the imports: it has no cycle, and optional packages stay optional."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter

from tests.house_rules import is_ours
from tests.source_code import ROOT, Source

Edges = dict[tuple[str, str], list[str]]
"""The imports that lead from one package to another, each with the lines that make it."""

FACES_OF_MODULES = {"deckhands.cli", "tool_worker.host"}
"""The command line has entry points only; programs in a sandbox have the standard library only."""
USE_THE_COMMAND_LINE = {"deckhands.__main__", "deckhands.headless"}
USE_OPTIONAL = {
    "deckhands.evaluation": (
        "deckhands/__init__.py",  # imports it when one of its names is used
        "deckhands/cli/",
        "deckhands/ingress/evaluations.py",
        "deckhands/ingress/waiting_tasks.py",
        "deckhands/interop/",
        "deckhands/rollouts/",
        "deckhands/server/evaluations.py",
        "deckhands/server/web/overviews.py",
    ),
    "deckhands.rollouts": ("deckhands/__init__.py", "deckhands/cli/", "deckhands/server/rollouts.py"),
    "deckhands.interop": ("deckhands/cli/", "deckhands/headless.py", "deckhands/server/openhands/"),
}
"""The files that offer what an optional package does; everything else works without it."""


def edges_of(sources: Iterable[Source]) -> Edges:
    found: Edges = {}
    for source in sources:
        if not is_ours(source.path):
            continue
        importer = package_of(source.path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        for imported in source.imports:
            if not is_ours(f"{imported.library}/a.py"):
                continue
            owner = package_of(imported.name)
            if owner != importer:
                found.setdefault((importer, owner), []).append(f"{source.path}:{imported.line} {imported.name}")
    return found


@cache
def names_of(package: str) -> set[str]:
    """Return the names of a package's face; empty: it has none, so nothing of it may be imported."""
    stub = ROOT / package.replace(".", "/") / "__init__.pyi"
    if not stub.exists():
        return set()
    statements = ast.parse(stub.read_text(encoding="utf-8")).body
    return {
        alias.name for statement in statements if isinstance(statement, ast.ImportFrom) for alias in statement.names
    }


def package_of(name: str) -> str:
    """Return the package of a module: its first two names if they are a directory, else the module itself."""
    first, *rest = name.split(".")
    if rest and (ROOT / first / rest[0]).is_dir():
        return f"{first}.{rest[0]}"
    return f"{first}.{rest[0]}" if rest and (ROOT / first / f"{rest[0]}.py").exists() else first


def find_cycle(edges: Edges) -> list[str]:
    graph: dict[str, set[str]] = {}
    for importer, owner in edges:
        graph.setdefault(importer, set()).add(owner)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle = error.args[1]
        return [line for pair in zip(cycle[1:], cycle, strict=False) for line in edges[pair[0], pair[1]][:5]]
    return []


def find_imports_past_faces(edges: Edges) -> list[str]:
    return [
        line
        for (_, owner), lines in edges.items()
        if (ROOT / owner.replace(".", "/")).is_dir() and "." in owner and owner not in FACES_OF_MODULES
        for line in lines
        if line.rpartition(" ")[2].removeprefix(f"{owner}.") not in {owner, *names_of(owner)}
        and not line.startswith("deckhands/__init__.py:")  # the face of faces
    ]


def find_imports_of_the_command_line(edges: Edges) -> list[str]:
    return [
        line
        for (importer, owner), lines in edges.items()
        if owner == "deckhands.cli" and importer not in USE_THE_COMMAND_LINE
        for line in lines
    ]


def find_imports_of_optional_packages(edges: Edges) -> list[str]:
    return [
        line
        for (_, owner), lines in edges.items()
        for line in lines
        if owner in USE_OPTIONAL and not line.startswith(USE_OPTIONAL[owner])
    ]


GRAPH_RULES: dict[Callable[[Edges], list[str]], str] = {
    find_cycle: "packages import each other, turn one of these imports round",
    find_imports_past_faces: "import the name from the package, and add it to the package's __init__.pyi",
    find_imports_of_the_command_line: "move the shared part below deckhands/cli",
    find_imports_of_optional_packages: "the core imports an optional package",
}


def find_broken_imports(sources: Iterable[Source]) -> list[str]:
    """Return the imports that break a rule of the graph, each with the way out."""
    edges = edges_of(sources)
    return [f"{line}: {fix}" for find, fix in GRAPH_RULES.items() for line in find(edges)]
