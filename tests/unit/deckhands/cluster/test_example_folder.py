"""The examples are found from the package itself, wherever it is installed."""

from __future__ import annotations

import deckhands
from deckhands.cluster.home import FOLDER, load_examples


def test_they_are_a_part_of_the_package():
    (package,) = deckhands.__path__
    assert FOLDER.samefile(f"{package}/examples")


def test_each_has_a_project_and_a_script_that_is_there():
    found = load_examples()
    assert [example.name for example in found] == ["billing_dates", "expense_totals", "free_slots", "page_cache"]
    for example in found:
        assert (example.project / "tests").is_dir()
        assert example.model == f"scripted/{example.script}"
        assert example.turns >= 5


def test_a_copy_has_no_compiled_files(tmp_path):
    example = load_examples()[0]
    copy = example.copy_to(tmp_path / "copy")
    assert (copy / "README.md").read_text() == (example.project / "README.md").read_text()
    assert list(copy.rglob("*.pyc")) == []
