"""Files and ranges of their lines, as events read and write them that name no editor."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tool_worker.host.editor.file_lines import FileLines
from tool_worker.host.editor.file_tools import FileTools
from tool_worker.host.text_files.versioned_files import VersionedFiles

TEN = "".join(f"{number}\n" for number in range(10))
JSON = (
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.floats()
    | st.text("ab\n\0\ud800", max_size=3)
    | st.lists(st.none())
)


@pytest.fixture
def lines() -> FileLines:
    return FileLines(VersionedFiles())


def read(lines: FileLines, path: object, **arguments: object) -> dict[str, Any]:
    return lines.read({"path": str(path), "cwd": "/nowhere", **arguments})


def write(lines: FileLines, path: object, content: str, **arguments: object) -> dict[str, Any]:
    return lines.write({"path": str(path), "content": content, "cwd": "/nowhere", **arguments})


class TestRead:
    @pytest.mark.parametrize(
        ("start", "end", "shown"),
        [
            (0, -1, TEN),
            (3, -1, "3\n4\n5\n6\n7\n8\n9\n"),
            (3, 5, "3\n4\n"),
            (0, 1, "0\n"),
            (9, 10, "9\n"),
            (4, 4, ""),
            (8, 99, "8\n9\n"),
            (50, -1, ""),
        ],
    )
    def test_a_range_begins_with_0_and_excludes_its_end(
        self, lines: FileLines, tmp_path: Path, start: int, end: int, shown: str
    ) -> None:
        (tmp_path / "a.txt").write_text(TEN)
        result = read(lines, tmp_path / "a.txt", start=start, end=end)
        assert result == {"content": shown, "is_error": False, "path": str(tmp_path / "a.txt")}

    def test_a_relative_path_begins_where_the_shell_is(self, lines: FileLines, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("text")
        result = read(lines, "a.txt", cwd=str(tmp_path))
        assert (result["content"], result["path"]) == ("text", str(tmp_path / "a.txt"))

    def test_text_is_decoded_as_it_is_encoded(self, lines: FileLines, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes("grün\r\nä".encode("utf-16"))
        assert read(lines, tmp_path / "a.txt")["content"] == "grün\nä"

    def test_unreadable_file_is_an_error_with_a_reason(self, lines: FileLines, tmp_path: Path) -> None:
        (tmp_path / "a.bin").write_bytes(b"\x7fELF\0\0")
        os.mkfifo(tmp_path / "fifo")
        assert read(lines, "b/a.txt", cwd=str(tmp_path)) == {
            "content": f"File not found: {tmp_path}/b/a.txt. Your current working directory is {tmp_path}.",
            "is_error": True,
            "path": f"{tmp_path}/b/a.txt",
        }
        for name, text in [
            ("", f"Path is a directory: {tmp_path}/. You can only read files."),
            ("a.bin", f"ERROR_BINARY_FILE: {tmp_path}/a.bin holds no text. Use bash to look into it."),
            ("fifo", f"File validation failed for {tmp_path}/fifo: It is a FIFO, and only regular files can be read"),
        ]:
            result = read(lines, f"{tmp_path}/{name}")
            assert result["is_error"]
            assert result["content"].startswith(text)

    def test_more_than_an_event_can_hold_is_read_in_parts(self, tmp_path: Path) -> None:
        lines = FileLines(VersionedFiles(), max_read_chars=10)
        (tmp_path / "a.txt").write_text(TEN)
        result = read(lines, tmp_path / "a.txt")
        assert result["is_error"]
        assert "These 10 lines are 20 characters long, and at most 10 are read at once." in result["content"]
        assert read(lines, tmp_path / "a.txt", start=5)["content"] == "5\n6\n7\n8\n9\n"

    def test_a_picture_is_shown(self, lines: FileLines, tmp_path: Path) -> None:
        (tmp_path / "a.gif").write_bytes(b"GIF89a")
        assert read(lines, tmp_path / "a.gif") == {
            "content": f"The picture {tmp_path}/a.gif is shown.",
            "is_error": False,
            "path": f"{tmp_path}/a.gif",
            "image_url": "data:image/gif;base64,R0lGODlh",
        }


class TestWrite:
    @pytest.mark.parametrize(
        ("content", "start", "end", "written"),
        [
            ("new", 0, -1, "new\n"),
            ("new\n", 0, -1, "new\n"),
            ("new\n\n", 0, -1, "new\n\n"),
            ("", 0, -1, ""),
            ("x\ny", 1, 2, "0\nx\ny\n2\n"),
            ("x", 1, 1, "0\nx\n1\n2\n"),
            ("x", 0, 0, "x\n0\n1\n2\n"),
            ("x", 3, 3, "0\n1\n2\nx\n"),
            ("x", 99, -1, "0\n1\n2\nx\n"),
            ("x", 1, -1, "0\nx\n"),
            ("", 1, 2, "0\n2\n"),
            ("\n", 1, 2, "0\n\n2\n"),
        ],
    )
    def test_lines_take_the_place_of_a_range(
        self, lines: FileLines, path: Path, content: str, start: int, end: int, written: str
    ) -> None:
        path.write_text("0\n1\n2\n")
        assert write(lines, path, content, start=start, end=end) == {
            "content": "",
            "is_error": False,
            "path": str(path),
        }
        assert path.read_text() == written

    def test_a_missing_file_is_made_with_its_directories(self, lines: FileLines, tmp_path: Path) -> None:
        assert write(lines, "b/c/a.txt", "one\ntwo", cwd=str(tmp_path))["path"] == f"{tmp_path}/b/c/a.txt"
        assert (tmp_path / "b/c/a.txt").read_text() == "one\ntwo\n"
        write(lines, "b/empty", "", cwd=str(tmp_path))
        assert (tmp_path / "b/empty").read_bytes() == b""
        write(lines, "b/windows", "one\r\ntwo", cwd=str(tmp_path))
        assert (tmp_path / "b/windows").read_bytes() == b"one\r\ntwo\r\n"

    def test_file_keeps_encoding_line_breaks_mode_and_links(self, lines: FileLines, tmp_path: Path) -> None:
        path, link = tmp_path / "a.sh", tmp_path / "link"
        path.write_bytes(b"gr\xfcn\r\nb\r\n")
        path.chmod(0o750)
        link.symlink_to(path)
        assert not write(lines, link, "ä", start=1, end=2)["is_error"]
        assert path.read_bytes() == b"gr\xfcn\r\n\xe4\r\n"
        assert path.stat().st_mode & 0o777 == 0o750
        assert link.is_symlink()

    def test_unterminated_last_line_is_not_joined_to_the_next(self, lines: FileLines, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("0\n1")
        write(lines, tmp_path / "a.txt", "2", start=2)
        assert (tmp_path / "a.txt").read_text() == "0\n1\n2\n"

    def test_failed_write_is_an_error_and_changes_nothing(self, lines: FileLines, tmp_path: Path) -> None:
        (tmp_path / "a.bin").write_bytes(b"\x7fELF\0\0")
        (tmp_path / "a.txt").write_bytes(b"gr\xfcn\n")
        for name, content, text in [
            ("", "x", f"Path is a directory: {tmp_path}/. You can only write to files."),
            ("a.bin", "x", f"File could not be decoded as text: {tmp_path}/a.bin. If all of it"),
            ("a.txt", "→", f"No edit was performed. {tmp_path}/a.txt is encoded as cp1252"),
            ("a.txt/b/c", "x", "Ran into Not a directory while trying to write to"),
            ("b.txt", "x" * (11 * 2**20), "File is too large (11.0MB)"),
            ("b.txt", "\0", "Invalid `content` parameter"),
        ]:
            result = write(lines, f"{tmp_path}/{name}", content)
            assert result["is_error"]
            assert text in result["content"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.txt"]
        assert (tmp_path / "a.txt").read_bytes() == b"gr\xfcn\n"

    @pytest.mark.parametrize(
        ("start", "end", "text"),
        [
            (-1, -1, "Invalid `start` parameter: -1. It should be an integer from 0 on."),
            (0, -2, "Invalid `end` parameter: -2. It should be an integer from -1 on."),
            (2, 1, "Invalid `end` parameter: 1. It should be -1, or at least `start`, which is 2."),
        ],
    )
    @pytest.mark.parametrize("name", ["a.txt", "missing"])
    def test_a_range_that_is_none_is_refused(
        self, lines: FileLines, tmp_path: Path, start: int, end: int, text: str, name: str
    ) -> None:
        (tmp_path / "a.txt").write_text(TEN)
        assert write(lines, tmp_path / name, "x", start=start, end=end)["content"] == text
        assert read(lines, tmp_path / "a.txt", start=start, end=end)["content"] == text
        assert (tmp_path / "a.txt").read_text() == TEN
        assert not (tmp_path / "missing").exists()


def test_the_editor_undoes_what_was_written(tmp_path: Path) -> None:
    tools = FileTools(str(tmp_path))
    path = str(tmp_path / "a.txt")
    tools.run("edit", {"command": "create", "path": path, "file_text": "one\n"})
    tools.run("write", {"path": "a.txt", "content": "two", "cwd": str(tmp_path)})
    assert not tools.run("edit", {"command": "undo_edit", "path": path})["is_error"]
    assert (tmp_path / "a.txt").read_text() == "one\n"


@given(
    st.dictionaries(st.sampled_from(["path", "content", "start", "end", "cwd"]), JSON),
    st.sampled_from(["a.txt", "b.txt", "", "a.txt/b", "."]) | st.none(),
    st.booleans(),
)
def test_every_call_is_answered(arguments: dict[str, object], name: str | None, has_directory: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "a.txt").write_bytes(b"one\r\ntwo")
        if has_directory:
            arguments["cwd"] = directory
        if name is not None:
            arguments["path"] = f"{directory}/{name}"
        elif arguments.get("content") is not None:
            arguments["path"] = "\0"
        tools = FileTools(directory)
        for tool in ("read", "write"):
            result = tools.run(tool, arguments)
            json.dumps(result, ensure_ascii=False).encode()
            assert set(result) == {"content", "is_error", "path"}
            assert "failed: " not in str(result["content"]) or "validation failed" in str(result["content"])
