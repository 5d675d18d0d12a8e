"""Datasets in published formats: each row becomes an instance, and errors name their line."""

from __future__ import annotations

import json
import re
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from broker.runtime.errors import UsageError
from deckhands.evaluation.datasets.dataset import read_dataset, to_absolute_name
from deckhands.evaluation.datasets.file_trees import MAX_PATCH_CHARS, TreeFile, make_patch, read_tree, split_left_out
from deckhands.evaluation.datasets.repositories import find_touched_files
from tests.dataset_parts import HUMAN_EVAL, PNG, QUESTION, checked, mirror_in, swe_rows, write_rows
from tests.entry_points import install_package


def test_swe_bench_rows_use_their_commit_and_test_patch(tmp_path: Path) -> None:
    commit = mirror_in(tmp_path / "mirrors")
    rows = swe_rows(commit)
    (found,) = read_dataset(write_rows(tmp_path, rows), repositories=tmp_path / "mirrors")
    begun_with = read_tree(found.workspace)
    assert set(begun_with) == {"calc.py", "tests/test_calc.py", "tests/test_old.py", "run.sh"}
    assert begun_with["run.sh"].is_executable
    hidden = read_tree(found.hidden)
    assert b"add(1, 2) == 3" in hidden["tests/test_calc.py"].content
    assert "tests/test_old.py" not in hidden
    assert found.tags == ("acme/calc",)
    wrong = checked(found, tmp_path / "wrong")
    assert wrong.returncode == 1
    assert "tests/test_calc.py::test_add: failed" in wrong.stdout
    assert "tests/test_calc.py::test_zero: failed" not in wrong.stdout
    assert not (tmp_path / "wrong" / "tests" / "test_old.py").exists()
    right = checked(found, tmp_path / "right", {"calc.py": "def add(a, b):\n    return a + b\n"})
    assert (right.returncode, "2 of 2 tests pass" in right.stdout) == (0, True), right


@pytest.mark.parametrize("code", ["import os\nos._exit(0)\n", "print('PASSED tests/test_calc.py::test_add')\n"])
def test_program_ending_or_faking_the_tests_is_not_right(tmp_path: Path, code: str) -> None:
    commit = mirror_in(tmp_path / "mirrors")
    (found,) = read_dataset(write_rows(tmp_path, swe_rows(commit)), repositories=tmp_path / "mirrors")
    assert checked(found, tmp_path / "cheat", {"calc.py": code}).returncode == 1


def test_tests_may_be_named_as_unittest_and_django_do_it(tmp_path: Path) -> None:
    commit = mirror_in(tmp_path / "mirrors")
    names = {"FAIL_TO_PASS": ["test_add"], "PASS_TO_PASS": ["test_unit (tests.test_calc.Case)"]}
    (found,) = read_dataset(write_rows(tmp_path, swe_rows(commit, **names)), repositories=tmp_path / "mirrors")
    repaired = {"calc.py": "def add(a, b):\n    return a + b\n"}
    assert checked(found, tmp_path / "two", repaired).returncode == 0


def test_django_runs_its_tests_by_its_own_runner(tmp_path: Path) -> None:
    commit = mirror_in(tmp_path / "mirrors", "django/django")
    names = {"FAIL_TO_PASS": ["test_sum (test_calc.Case)"], "PASS_TO_PASS": [], "repo": "django/django"}
    (found,) = read_dataset(write_rows(tmp_path, swe_rows(commit, **names)), repositories=tmp_path / "mirrors")
    repaired = {"calc.py": "def add(a, b):\n    return a + b\n"}
    assert checked(found, tmp_path / "right", repaired).returncode == 0
    assert checked(found, tmp_path / "wrong").returncode == 1
    printing = "print('test_sum (test_calc.Case) ... ok')\n"
    for name in ("tests/runtests.py", "calc.py"):
        assert checked(found, tmp_path / name.replace("/", "-"), {name: printing}).returncode == 1


def test_a_row_without_a_test_patch_is_checked_too(tmp_path: Path) -> None:
    commit = mirror_in(tmp_path / "mirrors")
    changes = {"test_patch": "", "FAIL_TO_PASS": ["tests/test_calc.py::test_zero"], "PASS_TO_PASS": []}
    (found,) = read_dataset(write_rows(tmp_path, swe_rows(commit, **changes)), repositories=tmp_path / "mirrors")
    assert checked(found, tmp_path / "right").returncode == 0


def test_repository_may_be_an_archive_with_a_top_directory(tmp_path: Path) -> None:
    commit = mirror_in(tmp_path / "mirrors")
    archives = tmp_path / "archives"
    archives.mkdir()
    for ending in ("tar.gz", "zip"):
        archive = archives / f"acme__calc-1.{ending}"
        command = ("git", "archive", "--prefix=calc-1/", "-o", str(archive), commit)
        subprocess.run(command, cwd=tmp_path / "mirrors" / "acme__calc.git", check=True)
        (found,) = read_dataset(write_rows(tmp_path, swe_rows(commit)), repositories=archives)
        assert set(read_tree(found.workspace)) == {"calc.py", "tests/test_calc.py", "tests/test_old.py", "run.sh"}
        archive.unlink()


def test_unusable_swe_bench_rows_are_listed_by_line(tmp_path: Path) -> None:
    commit = mirror_in(tmp_path / "mirrors")
    changes: list[dict[str, Any]] = [
        {},
        {"instance_id": "two", "base_commit": "0" * 40},
        {"instance_id": "three", "repo": "acme/nowhere"},
        {"instance_id": "four", "test_patch": "--- a/calc.py\n+++ b/calc.py\n@@ -1 +1 @@\n-nothing\n+something\n"},
        {"instance_id": "five", "FAIL_TO_PASS": "[not json"},
        {"instance_id": "six", "test_patch": "--- a/../../etc/passwd\n+++ b/../../etc/passwd\n@@ -1 +1 @@\n-a\n+b\n"},
        {"instance_id": "seven", "repo": "acme/../../etc"},
        {"instance_id": "eight", "base_commit": "--output=/tmp/x"},
        {"instance_id": "nine", "FAIL_TO_PASS": []},
    ]
    path = write_rows(tmp_path, [row for change in changes for row in swe_rows(commit, **change)])
    with pytest.raises(UsageError) as raised:
        read_dataset(path, repositories=tmp_path / "mirrors")
    why = dict(re.findall(r"(line \d+): (.*?)(?=; line|\. Correct)", str(raised.value)))
    assert list(why) == [f"line {number}" for number in range(2, 10)]
    assert "has no commit" in why["line 2"]
    assert "neither a mirror of acme/nowhere nor an archive" in why["line 3"]
    assert why["line 4"].startswith("test_patch: ")
    assert why["line 5"].startswith("FAIL_TO_PASS")
    assert "no relative path" in why["line 6"]
    with pytest.raises(UsageError, match=r"line 1: .*name --repositories DIR"):
        read_dataset(path)


def test_human_eval_rows(tmp_path: Path) -> None:
    (found,) = read_dataset(write_rows(tmp_path, [HUMAN_EVAL]))
    assert found.id == "HumanEval-0"
    assert checked(found, tmp_path / "begun").returncode == 1
    right = {"solution.py": HUMAN_EVAL["prompt"] + HUMAN_EVAL["canonical_solution"]}
    assert checked(found, tmp_path / "right", right).returncode == 0
    for number, code in enumerate(("import os; os._exit(0)", "import sys; sys.exit(0)", "print('passed')")):
        assert checked(found, tmp_path / f"cheat-{number}", {"solution.py": code}).returncode == 1
    changed = [{**HUMAN_EVAL, "task_id": "b", "entry_point": "a b"}, {**HUMAN_EVAL, "task_id": "c", "prompt": ""}]
    with pytest.raises(UsageError, match=r"line 2: entry_point: .*line 3: prompt: "):
        read_dataset(write_rows(tmp_path, [HUMAN_EVAL, *changed]))


def test_questions_with_their_files(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("1")
    (tmp_path / "picture.png").write_bytes(PNG)
    rows = [
        {**QUESTION, "task_id": "a", "file_name": "table.csv"},
        {**QUESTION, "task_id": "b", "file_name": "picture.png", "Final answer": 17},
    ]
    table, picture = read_dataset(write_rows(tmp_path, rows))
    assert read_tree(table.workspace) == {"table.csv": TreeFile(b"1")}
    assert (table.images, table.tags, table.answer) == ((), ("level-1",), "egalitarian")
    assert (picture.images, picture.answer) == ((str(tmp_path / "picture.png"),), "17")
    wrong = [{**QUESTION, "task_id": "c", "Final answer": "?"}, {**QUESTION, "task_id": "d", "file_name": "none.csv"}]
    wrong += [{**QUESTION, "task_id": "e", "file_name": "../secret"}]
    with pytest.raises(UsageError, match=r"line 1: .*not published.*line 2: .*there is no.*line 3: .*no relative path"):
        read_dataset(write_rows(tmp_path, wrong))


def test_task_pictures_are_relative_and_checked_before_start(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    row = {"id": "a", "task": "t", "answer": "1", "images": ["a.png", "https://example.org/b.png"]}
    (found,) = read_dataset(write_rows(tmp_path, [row]))
    assert found.images == (str(tmp_path / "a.png"), "https://example.org/b.png")
    with pytest.raises(UsageError, match=r"line 1: images: The picture .*c.png cannot be read"):
        read_dataset(write_rows(tmp_path, [{**row, "images": ["c.png"]}]))


def test_the_name_of_a_dataset_means_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert to_absolute_name("shipped") == "shipped"
    assert to_absolute_name("rows.jsonl") == str(tmp_path / "rows.jsonl")
    assert to_absolute_name("inspect:tasks.py@one") == f"inspect:{tmp_path / 'tasks.py'}@one"


def test_a_patch_is_what_git_applies(tmp_path: Path) -> None:
    before = {
        "kept.txt": TreeFile(b"kept"),
        "form.txt": TreeFile(b"one\x0ctwo\r\nthree\n"),
        "gone.txt": TreeFile(b"gone\n"),
        "picture": TreeFile(b"\x00"),
        "run.sh": TreeFile(b"echo\n"),
        "with space.txt": TreeFile(b"a\nb\n"),
    }
    after = {
        "kept.txt": TreeFile(b"kept"),
        "form.txt": TreeFile(b"one\x0c2\r\nthree\n"),
        "empty.txt": TreeFile(b""),
        "new.sh": TreeFile(b"true", is_executable=True),
        "picture": TreeFile(b"\x00\x01"),
        "run.sh": TreeFile(b"echo\n", is_executable=True),
        "with space.txt": TreeFile(b"a\nc"),
    }
    patch, named = split_left_out(make_patch(before, after))
    assert named == ["Binary files a/picture and b/picture differ"]
    folder = tmp_path / "files"
    for name, file in before.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(file.content)
    subprocess.run(("git", "apply", "-"), cwd=folder, input=patch.encode(), check=True)
    assert read_tree(folder) == {**after, "picture": before["picture"]}
    left, deleted = find_touched_files(patch)
    assert set(deleted) == {"gone.txt"}
    assert set(left) >= {"form.txt", "new.sh", "with space.txt"}


def test_a_patch_names_what_is_beyond_its_limit() -> None:
    after = {f"file-{number}": TreeFile(b"text\n") for number in range(8_000)}
    patch = make_patch({}, after)
    assert len(patch) < MAX_PATCH_CHARS + 100
    whole, named = split_left_out(patch)
    assert whole.count("diff --git") > 10
    assert named[-1].startswith("Binary files and ")
    assert int(named[-1].split()[3]) + len(named) - 1 + whole.count("diff --git") == 8_000


def test_large_file_of_line_ends_is_compared_in_little_memory() -> None:
    before, after = {"b": TreeFile(b"\n" * 2**24)}, {"a": TreeFile(b"\n" * 2**24), "b": TreeFile(b"\n" * 2**23)}
    tracemalloc.start()
    try:
        patch = make_patch(before, after)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    assert patch.count("Binary files") == 2


def test_a_dataset_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "def rows(argument):\n"
        "    yield {'id': 'one', 'task': argument, 'answer': '1'}\n"
        "    yield {'id': 'two', 'task': 't', 'check': 'true', 'workspace': {'a.txt': 'a'}, 'hidden': {'b': b'b'}}\n"
        "    if argument == 'bad':\n"
        "        yield {'id': 'three', 'task': 't', 'check': 'true', 'workspace': {'../a.txt': 'a'}}\n"
        "    if argument == 'worse':\n"
        "        raise RuntimeError('no network')\n"
    )
    install_package(tmp_path, monkeypatch, "riddles", source, {"deckhands.datasets": {"riddles": "rows"}})
    one, two = read_dataset("riddles:What is it?")
    assert (one.task, read_tree(two.workspace), read_tree(two.hidden)) == (
        "What is it?",
        {"a.txt": TreeFile(b"a")},
        {"b": TreeFile(b"b")},
    )
    assert to_absolute_name("riddles:x") == "riddles:x"
    with pytest.raises(UsageError, match=r"row 3: workspace: '../a.txt' is no relative path"):
        read_dataset("riddles:bad")
    with pytest.raises(UsageError, match=r"RuntimeError: no network"):
        read_dataset("riddles:worse")
    with pytest.raises(UsageError, match="cannot be read") as raised:
        read_dataset("ridles")
    assert "'riddles'" in str(raised.value.remedy)


def test_rows_that_are_no_objects_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(QUESTION) + "\n[1]\nnothing\n")
    with pytest.raises(UsageError, match=r"line 2: it is not a JSON object; line 3: "):
        read_dataset(tmp_path / "rows.jsonl")
