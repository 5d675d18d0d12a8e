"""grep and glob: matches, notes about omissions, and bounded time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from tests.polling import until
from tool_worker.host.search.file_search import MAX_FILE_BYTES, SearchError, find_files, search_lines
from tool_worker.host.search.limited_work import run_limited


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {"a.py": "Needle", "b.txt": "needle", "src/c.py": "hay", "src/d.py": "a needle too", "src/in/e.ts": "3 hay"}
    hidden = {".hidden/f.py": "needle", "node_modules/g.py": "needle", "b.bin": "needle\0"}
    for age, (name, text) in enumerate({**files, **hidden}.items()):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        os.utime(path, (0, 1e9 - age))
    return tmp_path


def grep(directory: Path, **arguments: object) -> str:
    return search_lines(arguments, str(directory))


def files_with(directory: Path, **arguments: object) -> list[str]:
    return grep(directory, **arguments).splitlines()[::3]


def glob(directory: Path, **arguments: object) -> list[str]:
    return find_files(arguments, str(directory)).splitlines()


def test_grep_finds_lines_in_files_those_changed_last_first(project: Path) -> None:
    assert grep(project, pattern="need.e") == "a.py\n1:Needle\n\nb.txt\n1:needle\n\nsrc/d.py\n1:a needle too"
    os.utime(project / "src/d.py", (0, 2e9))
    assert files_with(project, pattern="needle") == ["src/d.py", "a.py", "b.txt"]
    assert grep(project, pattern="nothing") == "No line matches."


def test_grep_looks_where_it_is_asked_to(project: Path) -> None:
    assert files_with(project, pattern="needle", include="*.py") == ["a.py", "src/d.py"]
    assert files_with(project, pattern="needle", include="*.{ts,txt}") == ["b.txt"]
    assert files_with(project, pattern="needle", include="!*.py") == ["b.txt"]
    assert files_with(project, pattern="needle", path="src") == ["src/d.py"]
    assert files_with(project, pattern="needle", path="src/d.py") == ["src/d.py"]
    assert files_with(project, pattern="needle", path=".hidden") == [".hidden/f.py"]
    assert files_with(project, pattern="needle", path=f"{project}/src") == [f"{project}/src/d.py"]
    assert files_with(project, pattern=r"^\d\b", include="src/**/*.ts") == ["src/in/e.ts"]
    assert files_with(project, pattern="needle", case_sensitive=True) == ["b.txt", "src/d.py"]


def test_grep_shows_the_lines_around_each_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("\n".join("x" if n in (3, 5, 12) else f"line {n}" for n in range(1, 15)))
    assert grep(tmp_path, pattern="^x$", context=1) == (
        "a\n2-line 2\n3:x\n4-line 4\n5:x\n6-line 6\n--\n11-line 11\n12:x\n13-line 13"
    )


def test_omissions_of_grep_are_reported(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("x\n" * 150)
    text = grep(tmp_path, pattern="x")
    assert text.count(":x") == 200
    assert text.endswith(
        "[250 more lines match, 1 more files among them. Use a narrower pattern, `include` or `path`.]"
    )


def test_files_that_are_too_large_are_counted(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text("x")
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert grep(tmp_path, pattern="x") == "small.txt\n1:x\n\n[1 files of more than 32 MiB were not read.]"


def test_long_line_shows_the_part_around_its_match(tmp_path: Path) -> None:
    (tmp_path / "min.js").write_text("a" * 100_000 + "needle" + "b" * 100_000)
    text = grep(tmp_path, pattern="needle")
    assert "aneedleb" in text
    assert len(text) < 400
    assert "[line of 200006 characters]" in text


def test_glob_finds_files_by_path_those_changed_last_first(project: Path) -> None:
    assert glob(project, pattern="**/*.py") == ["a.py", "src/c.py", "src/d.py"]
    assert glob(project, pattern="src/*") == ["src/c.py", "src/d.py"]
    assert glob(project, pattern="src/**") == ["src/c.py", "src/d.py", "src/in/e.ts"]
    assert glob(project, pattern="{a,[!a-c]}.{py,ts}") == ["a.py", "src/d.py", "src/in/e.ts"]
    assert glob(project, pattern="?.py", path="src/") == ["src/c.py", "src/d.py"]
    assert glob(project, pattern="in/*.ts", path="src") == ["src/in/e.ts"]
    absolute = [f"{project}/src/c.py", f"{project}/src/d.py"]
    assert glob(project, pattern="*.py", path=f"{project}/src") == absolute
    assert glob(project, pattern=f"{project}/src/*.py") == ["src/c.py", "src/d.py"]
    os.utime(project / "src/d.py", (0, 2e9))
    assert glob(project, pattern="**/*.py") == ["src/d.py", "a.py", "src/c.py"]
    assert glob(project, pattern="*.rs") == ["No file matches."]


def test_names_may_hold_what_patterns_and_expressions_are_made_of(tmp_path: Path) -> None:
    (tmp_path / "a[1] {x}").mkdir()
    (tmp_path / "a[1] {x}" / "b+'.(c$").write_text("needle")
    (tmp_path / os.fsdecode(b"\xff.py")).write_text("x")
    for arguments in ({"pattern": r"a\[1\] \{x\}/*"}, {"pattern": "b+'.(c$"}, {"pattern": "*", "path": "a[1] {x}"}):
        assert glob(tmp_path, **arguments) == ["a[1] {x}/b+'.(c$"]
    assert glob(tmp_path, pattern="*.py") == ["\ufffd.py"]


def test_hundred_files_are_listed_and_the_rest_counted(tmp_path: Path) -> None:
    for number in range(130):
        (tmp_path / f"{number}.txt").write_text("x")
    listed = glob(tmp_path, pattern="*.txt")
    assert len(listed) == 101
    assert listed[-1] == "[30 more files match. Use a narrower pattern or `path`.]"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"pattern": "("}, "is not a regular expression of Python's: missing )"),
        ({"pattern": "x", "path": "nowhere"}, "There is no 'nowhere'. Paths begin in "),
        ({"pattern": "x", "context": 11}, "`context` is a number of lines from 0 to 10."),
        ({"pattern": "x", "context": "1"}, "`context` is a number"),
        ({"pattern": ""}, "`pattern` is a text"),
        ({"pattern": ["x"]}, "`pattern` is a text"),
        ({"pattern": "x" * 10_001}, "up to 10000 characters"),
        ({"pattern": "x", "path": "a\0b"}, "without NUL"),
    ],
)
def test_unsearchable_paths_are_reported(tmp_path: Path, arguments: dict[str, object], text: str) -> None:
    with pytest.raises(SearchError) as raised:
        grep(tmp_path, **arguments)
    assert text in str(raised.value)


def test_endless_expression_is_stopped_and_its_matches_kept(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("aab")
    (tmp_path / "old").write_text("a" * 60)
    os.utime(tmp_path / "old", (0, 0))
    began = monotonic()
    text = search_lines({"pattern": "(a+)+b"}, str(tmp_path), limit_seconds=2.0)
    assert monotonic() - began < 60
    assert text.startswith("new\n1:aab\n")
    assert "[The search was stopped after 2 seconds" in text


def test_a_path_pattern_that_never_ends_is_stopped(tmp_path: Path) -> None:
    (tmp_path / ("a" * 200)).write_text("")
    text = find_files({"pattern": "*a" * 40 + "b"}, str(tmp_path), limit_seconds=1.0)
    assert "[The search was stopped after 1 seconds" in text


def test_fifos_links_and_unreadable_files_hold_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "outside").symlink_to("/etc/passwd")
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert grep(tmp_path, pattern="root") == "No line matches."
    assert grep(tmp_path, pattern="root", path="fifo") == "No line matches."
    assert grep(tmp_path, pattern="root", path="zero") == "No line matches."


def test_huge_tree_is_searched_partly_with_notice(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text("x")
    text = find_files({"pattern": "*.txt"}, str(tmp_path), max_entries=10)
    assert "[Only 10 files and directories were looked at. Name a smaller `path`.]" in text


async def test_child_processes_end_with_the_search(tmp_path: Path) -> None:
    said = tmp_path / "pid"

    def work(_: Callable[[str], None]) -> None:
        with subprocess.Popen(["sleep", "1000"], env=None) as running:
            said.write_text(str(running.pid))

    _, is_ended = run_limited(3.0, work)
    assert not is_ended
    pid = int(said.read_text())

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    try:
        await until(is_gone, what="the end of the program")
    finally:
        if not is_gone():
            os.kill(pid, 9)
