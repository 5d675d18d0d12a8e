"""Datasets are checked completely before the first attempt, and selected in an order that depends on the seed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from deckhands.evaluation.datasets.dataset import read_dataset
from deckhands.evaluation.datasets.file_trees import MAX_BYTES, read_tree
from deckhands.evaluation.datasets.instances import Instance, select_instances
from tests.dataset_parts import checked, write_rows

SOME = [Instance(f"i-{number}", "task", tags=("odd",) if number % 2 else ()) for number in range(10)]


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "d.jsonl").write_text('{"id": "a", "task": "t", "workspace": "files", "check": "true"}\n\n')
    (found,) = read_dataset(tmp_path / "d.jsonl")
    assert found.workspace == tmp_path / "files"


def test_every_line_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    lines = [
        '{"id": "a", "task": "t", "answer": "1"}',
        '{"id": "a", "task": "t", "answer": "1"}',
        '{"id": "b", "task": "t"}',
        '{"id": "c", "task": "t", "check": "true", "workspace": "nowhere"}',
        '{"id": "../d", "task": "t", "check": "true"}',
        '{"id": "e", "task": "t", "check": "true", "chek": "x"}',
        "no json",
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    with pytest.raises(UsageError) as raised:
        read_dataset(tmp_path / "d.jsonl")
    for number in range(2, 8):
        assert f"line {number}:" in str(raised.value)
    assert "line 1:" not in str(raised.value)


def test_tests_may_be_named_instead_of_a_check(tmp_path: Path) -> None:
    text = "import unittest\nfrom a import f\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(), 1)\n"
    row = {"id": "a", "task": "t", "workspace": {"a.py": "f = lambda: 2\n"}, "hidden": {"test_a.py": text, "data": "1"}}
    (found,) = read_dataset(write_rows(tmp_path, [{**row, "tests": ["test_a.py"], "isolated": True}]))
    assert checked(found, tmp_path / "wrong").returncode == 1
    assert checked(found, tmp_path / "right", {"a.py": "f = lambda: 1\n"}).returncode == 0
    wrong = [{**row, "id": "b", "tests": ["data"]}, {**row, "id": "c", "tests": ["test_a.py"], "check": "true"}]
    wrong.append({**row, "id": "d", "tests": ["a.py"]})
    with pytest.raises(UsageError, match=r"line 1: tests: 'data' is not .*line 2: it has both .*line 3: tests: 'a.py'"):
        read_dataset(write_rows(tmp_path, wrong))


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b"\xff", "not UTF-8"), (b"", "has no lines")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "d.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=why):
        read_dataset(path)


def test_selection() -> None:
    assert [one.id for one in select_instances(SOME, only="odd", part=":2")] == ["i-1", "i-3"]
    shuffled = [one.id for one in select_instances(SOME, shuffle=True, seed=1)]
    assert shuffled != [one.id for one in SOME]
    assert sorted(shuffled) == [one.id for one in SOME]
    assert shuffled == [one.id for one in select_instances(list(reversed(SOME)), shuffle=True, seed=1)]
    assert [one.id for one in select_instances(SOME, shuffle=True, seed=1, part="-3:")] == shuffled[-3:]


@pytest.mark.parametrize(("only", "part"), [("(", ""), ("", "a"), ("nothing", ""), ("", "20:")])
def test_empty_selection_is_refused(only: str, part: str) -> None:
    with pytest.raises(UsageError):
        select_instances(SOME, only=only, part=part)


def test_names_of_files_in_rows_are_written_in_one_way(tmp_path: Path) -> None:
    """A hidden file is laid over the agent's only if both have the same name."""
    row = {"id": "a", "task": "t", "check": "true", "hidden": {"./b.txt": "1", "c//d.txt": "2", "e/./f": "3"}}
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    (found,) = read_dataset(tmp_path / "d.jsonl")
    assert sorted(read_tree(found.hidden)) == ["b.txt", "c/d.txt", "e/f"]


@pytest.mark.parametrize("files", [{".": "x"}, {"a": "1", "./a": "2"}, {"a": "1", "a/b": "2"}])
def test_names_of_files_that_cannot_be_together_are_refused(tmp_path: Path, files: dict[str, str]) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"id": "a", "task": "t", "check": "true", "workspace": files}))
    with pytest.raises(UsageError, match="line 1: workspace: "):
        read_dataset(tmp_path / "d.jsonl")


def test_impossible_workspace_files_are_found_before_start(tmp_path: Path) -> None:
    for name in ("ws", "files"):
        (tmp_path / name).mkdir()
        os.truncate(os.open(tmp_path / name / "large", os.O_CREAT | os.O_RDWR), MAX_BYTES + 1)
    row = {"id": "a", "task": "t", "check": "true"}
    rows = [row | {"workspace": "ws"}, row | {"hidden": "ws"}, row | {"workspace": {"a": "x" * (MAX_BYTES + 1)}}]
    for number, one in enumerate(rows):
        (tmp_path / "d.jsonl").write_text(json.dumps(one))
        with pytest.raises(UsageError) as raised:
            read_dataset(tmp_path / "d.jsonl")
        assert f"line 1: {('workspace', 'hidden', 'workspace')[number]}: " in str(raised.value)
        assert "has more than 67,108,864 bytes" in str(raised.value)
    question = {"task_id": "a", "Question": "q", "Final answer": "1", "file_name": "files/large"}
    (tmp_path / "d.jsonl").write_text(json.dumps(question))
    with pytest.raises(UsageError, match=r"line 1: file_name: .*more than"):
        read_dataset(tmp_path / "d.jsonl")
