"""The environment variables that the packages read, found in their source: docs/settings.md names each of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from tests.house_rules import is_ours
from tests.source_code import ROOT, Source

OURS = re.compile(r"\b(?:DECKHANDS|LLM|LITELLM|SANDBOX_ENV|NO_CHANGE_TIMEOUT)_[A-Z_]*[A-Z]\b")
ENVIRONMENTS = {"env", "environ", "environment", "_env"}
"""What a mapping of variables is called in the packages."""
READS = {"get", "pop", "setdefault"}


def find_unnamed_variables(all_sources: Iterable[Source]) -> list[str]:
    """Return the variables that a package reads and docs/settings.md does not name."""
    named = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")))
    sources = [source for source in all_sources if is_ours(source.path)]
    constants = {name: value for source in sources for name, value in constants_of(source)}
    read = {name for source in sources for name in variables_read(source, constants)}
    assert {"DECKHANDS_HOST_ID", "NO_COLOR", "LLM_CONFIG", "TMPDIR", "PATH"} <= read
    return [f"{name} is read: name it in docs/settings.md" for name in sorted(read - named)]


def constants_of(source: Source) -> Iterator[tuple[str, str]]:
    """Yield the names that a file gives to texts."""
    for node in source.nodes(ast.Assign):
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from ((target.id, node.value.value) for target in node.targets if isinstance(target, ast.Name))


def variables_read(source: Source, constants: dict[str, str]) -> Iterator[str]:
    """Yield the variables that a file names as ours, and those that it reads from an environment."""
    for node in source.nodes(ast.Constant):
        if isinstance(node.value, str):
            yield from OURS.findall(node.value)
    for node in source.nodes(ast.Call, ast.Subscript):
        if isinstance(node, ast.Subscript):
            owner, key = node.value, node.slice
        elif isinstance(node.func, ast.Attribute) and node.func.attr in READS and node.args:
            owner, key = node.func.value, node.args[0]
        else:
            continue
        name = getattr(owner, "attr", getattr(owner, "id", ""))
        text = key.value if isinstance(key, ast.Constant) else constants.get(getattr(key, "id", ""))
        if name in ENVIRONMENTS and isinstance(text, str) and text.isupper():
            yield text
