"""The graph of packages, computed from the imports: it has no cycle, and optional packages stay optional."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.house_rules import is_ours
from tests.source_code import ROOT, tracked_sources

Edges = dict[tuple[str, str], list[str]]

OPTIONAL = {"deckhands.evaluation", "deckhands.interop", "deckhands.rollouts"}
MAY_USE_OPTIONAL = {"deckhands", "deckhands.cli", "deckhands.headless", *OPTIONAL}
"""The public interface imports them when one of their names is used."""
SERVES_EVALUATIONS = {"deckhands.ingress", "deckhands.server"}
"""They offer evaluations by Celery task and by HTTP."""


@pytest.fixture(scope="module")
def edges() -> Edges:
    """Return the imports that lead from one package to another, each with the lines that make it."""
    found: Edges = {}
    for source in tracked_sources():
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


FACES_OF_MODULES = {"deckhands.cli", "tool_worker.host"}
"""The command line has entry points only; programs in a sandbox have the standard library only."""


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


def test_packages_form_no_cycle(edges: Edges) -> None:
    graph: dict[str, set[str]] = {}
    for importer, owner in edges:
        graph.setdefault(importer, set()).add(owner)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle = error.args[1]
        lines = [line for pair in zip(cycle[1:], cycle, strict=False) for line in edges[pair[0], pair[1]][:5]]
        pytest.fail(f"{' <- '.join(cycle)}: turn one of these imports round\n" + "\n".join(lines))


def test_packages_are_imported_by_their_faces(edges: Edges) -> None:
    past = [
        line
        for (_, owner), lines in edges.items()
        if (ROOT / owner.replace(".", "/")).is_dir() and "." in owner and owner not in FACES_OF_MODULES
        for line in lines
        if line.rpartition(" ")[2].removeprefix(f"{owner}.") not in {owner, *names_of(owner)}
        and not line.startswith("deckhands/__init__.py:")  # the face of faces
    ]
    assert not past, "import the name from the package, and add it to the package's __init__.pyi:\n" + "\n".join(past)


def test_only_the_command_line_imports_the_command_line(edges: Edges) -> None:
    allowed = {"deckhands.__main__", "deckhands.headless"}
    found = [
        line
        for (importer, owner), lines in edges.items()
        if owner == "deckhands.cli"
        for line in lines
        if importer not in allowed
    ]
    assert not found, "move the shared part below deckhands/cli:\n" + "\n".join(found)


def test_the_core_needs_no_optional_package(edges: Edges) -> None:
    allowed = MAY_USE_OPTIONAL | SERVES_EVALUATIONS
    found = [
        line
        for (importer, owner), lines in edges.items()
        if owner in OPTIONAL and importer not in allowed
        for line in lines
    ]
    assert not found, "the core imports an optional package:\n" + "\n".join(found)
