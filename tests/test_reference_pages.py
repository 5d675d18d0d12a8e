"""The pages that are made of classes agree with them, and no variable is read that docs/settings.md does not name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from broker.contract.codec import find_kinds
from broker.runtime.settings import WORKER_SETTINGS
from controller_worker.settings import ControllerVariables
from tests.house_rules import is_ours
from tests.page_blocks import pages
from tests.reference_pages import PAGES, SCHEMAS
from tests.settings_page import own_fields
from tests.source_code import ROOT, Source, tracked_sources
from tool_worker.settings import ToolVariables

OURS = re.compile(r"\b(?:DECKHANDS|LLM|LITELLM|SANDBOX_ENV|NO_CHANGE_TIMEOUT)_[A-Z_]*[A-Z]\b")
ENVIRONMENTS = {"env", "environ", "environment", "_env"}
"""What a mapping of variables is called in the packages."""
READS = {"get", "pop", "setdefault"}


@pytest.mark.parametrize("path", PAGES)
def test_the_page_is_what_the_classes_say(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == PAGES[path](), f"{path} is out of date: run `make docs`"


def test_there_are_no_other_schemas() -> None:
    assert {f"{SCHEMAS}/{path.name}" for path in (ROOT / SCHEMAS).iterdir()} <= set(PAGES)


def test_every_process_knows_the_names_that_workers_read() -> None:
    assert {*own_fields(ControllerVariables), *own_fields(ToolVariables)} == WORKER_SETTINGS


def test_every_variable_that_is_read_is_on_the_page() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", page))
    sources = [source for source in tracked_sources() if is_ours(source.path) and source.path.endswith(".py")]
    constants = {name: value for source in sources for name, value in constants_of(source)}
    read = {name for source in sources for name in variables_read(source, constants)}
    assert {"DECKHANDS_HOST_ID", "NO_COLOR", "LLM_CONFIG", "TMPDIR", "PATH"} <= read
    assert sorted(read - named) == []


def test_every_variable_that_a_page_names_is_read() -> None:
    known = set(OURS.findall((ROOT / "docs" / "settings.md").read_text(encoding="utf-8")))
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert {name for name in OURS.findall(text) if name.startswith("DECKHANDS_")} - known == set(), page


def test_every_kind_has_a_section() -> None:
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^### `(\w+\.\w+)`$", page, re.MULTILINE))
    ours = {kind for kind, owner in find_kinds().items() if owner.__module__.startswith("broker.contract.")}
    assert sections == ours


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
