"""The pages agree with the tree: links lead somewhere, and the map of the architecture shows every package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import deckhands
from tests.house_rules import MAY_IMPORT
from tests.reference_pages import PAGES as REFERENCE_PAGES
from tests.source_code import ROOT, tracked_sources

PAGES = [source.path for source in tracked_sources() if source.path.endswith(".md")]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
FOLDERS = (*MAY_IMPORT, "tests", "benchmarks", "docs", "deploy", "examples")
MADE_BY_USERS = {"deploy/tools.env", "deploy/jobs.env"}
ROW = re.compile(r"^\| `(\w+/\w+)` \| .+ \| `([\w/.]+)` \|$", re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links_of(page: Path) -> list[str]:
    """Return the targets of a page's links that lead into the tree."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img src="([^"]+)"', text)
    return [target for target in found if not re.match(r"\w+:", target)]


@pytest.mark.parametrize("path", PAGES)
def test_every_link_of_a_page_leads_somewhere(path: str) -> None:
    page = ROOT / path
    broken = []
    for target in links_of(page):
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        if not linked.exists() or (anchor and anchor not in anchors_of(linked)):
            broken.append(target)
    assert not broken, f"{path} links to what is not there: {broken}"


def made_on(page: Path) -> set[str]:
    """Return the files whose whole text is on a page, below their names."""
    return set(re.findall(r"^`([\w./-]+)`\n\n```", page.read_text(encoding="utf-8"), flags=re.MULTILINE))


def packages() -> dict[str, str]:
    """Return every package, and the file that its docstring names to start with."""
    found = {}
    for package in MAY_IMPORT:
        for entrance in sorted((ROOT / package).glob("*/__init__.py")):
            docstring = ast.get_docstring(ast.parse(entrance.read_text(encoding="utf-8"))) or ""
            start = re.search(r"^Start with: ([\w/]+)\.$", docstring, re.MULTILINE)
            name = f"{package}/{entrance.parent.name}"
            found[name] = f"{name}/{start[1]}.py" if start else ""
    return found


def test_the_map_shows_every_package_and_where_to_start() -> None:
    """Adapt the tables of docs/architecture.md when a package is added, removed or renamed."""
    assert dict(ROW.findall(ARCHITECTURE.read_text(encoding="utf-8"))) == packages()


@pytest.mark.parametrize("path", PAGES)
def test_every_file_that_a_page_names_exists(path: str) -> None:
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", (ROOT / path).read_text(encoding="utf-8"))
    missing = sorted({name for name in named if not (ROOT / name).exists()} - MADE_BY_USERS - made_on(ROOT / path))
    assert not missing, f"{path} names what is not there: {missing}"


def test_every_test_that_a_page_names_exists() -> None:
    tests = [source for source in tracked_sources() if source.path.startswith("tests/") and source.path.endswith(".py")]
    known = {
        name for source in tests for name in re.findall(r"^\s*(?:async )?def (test_\w+)", source.text, re.MULTILINE)
    }
    pages = [(path, (ROOT / path).read_text(encoding="utf-8")) for path in PAGES if path.startswith("docs/")]
    named = {(path, name) for path, text in pages for name in re.findall(r"`(test_\w+)`", text)}
    missing = sorted((path, name) for path, name in named if name not in known | {"test_patch"})  # a field of SWE-bench
    assert not missing, f"name the tests that are there now: {missing}"


def test_python_reference_has_each_public_name_once() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: deckhands\.(\w+)$", page, re.MULTILINE)) == sorted(deckhands.__all__)


def test_site_shows_each_page_in_its_menu() -> None:
    menu = re.findall(r"^ +- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == sorted([*(path.name for path in (ROOT / "docs").glob("*.md")), "benchmarks.md"])


def test_decision_12_lists_each_part_and_each_decision() -> None:
    """Adapt its table when a concern is added, removed or renamed."""
    text = (ROOT / "docs" / "decisions" / "0012-packages-and-concerns.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?) \| .+? \| (.*)\|$", text, re.MULTILINE)
    core = ROOT / "controller_worker" / "core"
    parts = re.findall(r"^    (\w+): .+ = field\(", (core / "state.py").read_text(encoding="utf-8"), re.MULTILINE)
    order = (core / "order.py").read_text(encoding="utf-8")
    decisions = re.findall(r"^    \w+\.(\w+),", order[order.index("\nORDER") :], re.MULTILINE)
    assert sorted(name for cell, _ in rows for name in re.findall(r"`(\w+)`", cell)) == sorted(parts)
    assert sorted(name for _, cell in rows for name in re.findall(r"`(\w+)`", cell)) == sorted(decisions)


UNSHOWN = {
    *("model_error", "sandbox", "store", "workspace"),  # of a family; an error has the code of its member
    *("edit_refused", "editor", "file_access", "file_rejected", "invalid_parameter", "missing_parameter", "no_text"),
    *("failpoint",),  # the editor's are for the model, and this one is for tests
}


def test_troubleshooting_has_every_code_that_a_person_may_meet() -> None:
    sources = [one for one in tracked_sources() if one.path.endswith(".py") and one.path.split("/")[0] in MAY_IMPORT]
    codes = {code for one in sources for code in re.findall(r'^    code(?:: \S+)? = "(\w+)"', one.text, re.MULTILINE)}
    assert len(codes) > 60
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    shown = {
        code for cell in re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE) for code in re.findall(r"`(\w+)`", cell)
    }
    assert sorted(codes - UNSHOWN - shown) == []
    assert codes >= UNSHOWN


GENERATED = {path.removeprefix("docs/") for path in REFERENCE_PAGES} | {"api.md", "proof.md"}
"""Pages that programs write. They are counted apart from those that people write."""
LOOKED_UP = {"glossary.md"}
"""Written pages that are looked up as tables are: their words are not counted either."""
MAX_WRITTEN_PAGES = 28
MAX_RUNNING_WORDS = 55_000


def running_words(text: str) -> int:
    """Count the words that a reader reads in their order: without code blocks, comments for tests, and tables."""
    text = re.sub(r"^ *```.*?^ *```|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    return sum(bool(re.search(r"\w", word)) for line in lines for word in line.split())


def test_words_are_counted_without_code_and_tables() -> None:
    text = "# A title\n\n<!-- run: later -->\n```bash\nls -l\n```\n\n| a | table |\n|---|---|\n\n- Two more - words.\n"
    assert running_words(text) == 5


def test_written_pages_stay_few_and_short() -> None:
    written = [path for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED]
    read = [path for path in written if path.name not in LOOKED_UP]
    words = {path.name: running_words(path.read_text(encoding="utf-8")) for path in read}
    assert len(written) <= MAX_WRITTEN_PAGES, "merge pages that belong together"
    assert sum(words.values()) <= MAX_RUNNING_WORDS, f"shorten pages: {words}"
