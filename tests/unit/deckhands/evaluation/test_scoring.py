"""The part of an agent's work that counts: nothing with which it could decide its own score."""

from __future__ import annotations

import pytest

from deckhands.evaluation.datasets.file_trees import TreeFile
from deckhands.evaluation.scoring import build_check_files, compute_work

BEGUN_WITH = {"shop.py": TreeFile(b"old\n"), "lib/token.py": TreeFile(b"own\n"), "setup.cfg": TreeFile(b"[a]\n")}
HIDDEN = {"hidden_tests/test_shop.py": TreeFile(b"the tests\n")}


def test_changed_new_and_removed_files_count() -> None:
    found = {"shop.py": TreeFile(b"new\n"), "lib/new.py": TreeFile(b"more\n"), "setup.cfg": BEGUN_WITH["setup.cfg"]}
    work = compute_work(BEGUN_WITH, found, HIDDEN)
    assert work.left_out == ()
    assert build_check_files(work, HIDDEN) == {**found, **HIDDEN}


@pytest.mark.parametrize(
    "planted",  # besides the files of tests/security/test_evaluation_cheats.py
    [
        *("pytest.toml", "setup.cfg", "unittest/__init__.py", "hidden_tests/__init__.py", "hidden_tests/conftest.py"),
        *("lib/__pycache__/token.cpython-311.pyc", ".openhands/setup.sh", ".npmrc"),
    ],
)
def test_files_that_control_startup_do_not_count(planted: str) -> None:
    found = {**BEGUN_WITH, "shop.py": TreeFile(b"new\n"), planted: TreeFile(b"print('passed')\n")}
    work = compute_work(BEGUN_WITH, found, HIDDEN)
    assert work.left_out == (planted,)
    assert work.tree == {**BEGUN_WITH, "shop.py": TreeFile(b"new\n")}


def test_hidden_files_are_laid_over_last() -> None:
    found = {**BEGUN_WITH, "hidden_tests/test_shop.py": TreeFile(b"pass\n")}
    work = compute_work(BEGUN_WITH, found, HIDDEN)
    assert build_check_files(work, HIDDEN)["hidden_tests/test_shop.py"] == HIDDEN["hidden_tests/test_shop.py"]
    visible = {**BEGUN_WITH, "hidden_tests/test_shop.py": TreeFile(b"an older version\n")}
    assert build_check_files(compute_work(visible, found, HIDDEN), HIDDEN) == {**BEGUN_WITH, **HIDDEN}


def test_existing_module_may_have_a_library_name() -> None:
    begun_with = {"token.py": TreeFile(b"old\n")}
    assert compute_work(begun_with, {"token.py": TreeFile(b"new\n")}, {}).tree == {"token.py": TreeFile(b"new\n")}


@pytest.mark.parametrize("planted", ["tests/sub", "tests/sub/test_a.py/x", "tests/sub/test_a.py/y/z"])
def test_obstacles_to_hidden_files_do_not_count(planted: str) -> None:
    begun_with = {"tests/old.py": TreeFile(b"old\n")}
    hidden = {"tests/sub/test_a.py": TreeFile(b"the tests\n")}
    work = compute_work(begun_with, {**begun_with, planted: TreeFile(b"mine\n")}, hidden)
    assert (work.left_out, work.tree) == ((planted,), begun_with)
    emptied = compute_work(begun_with, {"tests": TreeFile(b"mine\n")}, hidden)
    assert (emptied.left_out, emptied.tree) == (("tests",), {})


TESTED = b'[tool.pytest.ini_options]\npythonpath = "src"\n'


@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [
        (None, b'[project]\nname = "shop"\n', True),
        (None, b'[tool.pytest.ini_options]\naddopts = "--collect-only"\n', False),
        (TESTED, TESTED + b'[project]\nname = "shop"\n', True),
        (TESTED, TESTED + b'addopts = "--collect-only"\n', False),
        (b"[project]\n", b"[tool.pytest]\n", False),
        (TESTED, b"no = toml = here", False),
        (None, b".".join([b"a"] * 2_000) + b" = 1\n", False),
        (None, b"# long\n" * 20_000, False),
    ],
)
def test_settings_of_pytest_in_a_project_file_do_not_count(before: bytes | None, after: bytes, counts: bool) -> None:
    name = "lib/pyproject.toml"
    begun_with = {} if before is None else {name: TreeFile(before)}
    work = compute_work(begun_with, {name: TreeFile(after)}, {})
    assert work.left_out == (() if counts else (name,))
    assert work.tree == ({name: TreeFile(after)} if counts else begun_with)
