"""What the file editor shows of files and directories."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from broker.contract.file_events import FileReadAction, FileReadObservation
from tests.editor_parts import error, run
from tool_worker.host.editor.file_editor import FileEditor
from tool_worker.host.editor.picture import MAX_PICTURE_BYTES
from tool_worker.tools.file_tools import ReadFile

FILE_NOTICE = (
    "<response clipped><NOTE>Due to the max output limit, only part of this file has been shown to you. You should "
    "retry this tool after you have searched inside the file with `grep -n` in order to find the line numbers of what "
    "you are looking for.</NOTE>"
)
DIRECTORY_NOTICE = (
    "<response clipped><NOTE>Due to the max output limit, only part of this directory has been shown to you. You "
    "should use `ls -la` instead to view large directories incrementally.</NOTE>"
)


class TestView:
    def test_numbers_lines(self, editor: FileEditor, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_text("one\n\n\tthree\x0cthree\nfour")
        assert run(editor, "view", path) == {
            "content": f"Here's the result of running `cat -n` on {path}:\n"
            "     1\tone\n     2\t\n     3\t\tthree\x0cthree\n     4\tfour\n",
            "is_error": False,
            "path": str(path),
            "prev_exist": True,
            "old_content": None,
            "new_content": None,
            "diff": None,
        }

    @pytest.mark.parametrize("text", ["", "\n"])
    def test_shows_no_text_as_one_empty_line(self, editor: FileEditor, tmp_path: Path, text: str) -> None:
        path = tmp_path / "a.txt"
        path.write_text(text)
        expected = f"Here's the result of running `cat -n` on {path}:\n     1\t\n"
        assert run(editor, "view", path)["content"] == expected
        assert run(editor, "view", path, view_range=[1, -1])["content"] == expected

    @pytest.mark.parametrize(
        ("view_range", "expected"),
        [
            ([3, 4], "     3\tline 3\n     4\tline 4\n"),
            ([10, 10], "    10\tline 10\n"),
            ([9, -1], "     9\tline 9\n    10\tline 10\n"),
        ],
    )
    def test_shows_a_range(self, editor: FileEditor, ten_lines: Path, view_range: list[int], expected: str) -> None:
        content = run(editor, "view", ten_lines, view_range=view_range)["content"]
        assert content == f"Here's the result of running `cat -n` on {ten_lines}:\n{expected}"

    def test_notes_first_that_the_file_has_fewer_lines(self, editor: FileEditor, ten_lines: Path) -> None:
        assert run(editor, "view", ten_lines, view_range=[9, 12])["content"] == (
            "NOTE: We only show up to 10 since there're only 10 lines in this file.\n"
            f"Here's the result of running `cat -n` on {ten_lines}:\n     9\tline 9\n    10\tline 10\n"
        )

    @pytest.mark.parametrize(
        ("view_range", "hint"),
        [
            ([0, 2], "Its first element `0` should be within the range of lines of the file: [1, 10]."),
            ([11, 12], "Its first element `11` should be within the range of lines of the file: [1, 10]."),
            ([4, 3], "Its second element `3` should be greater than or equal to the first element `4`."),
            ([4, -2], "Its second element `-2` should be greater than or equal to the first element `4`."),
            ([1], "It should be a list of two integers."),
            ([1, 2, 3], "It should be a list of two integers."),
            (["1", 2], "It should be a list of two integers."),
            ([True, 2], "It should be a list of two integers."),
            ("[1, 2]", "It should be a list of two integers."),
            (7, "It should be a list of two integers."),
        ],
    )
    def test_refuses_a_range(self, editor: FileEditor, ten_lines: Path, view_range: object, hint: str) -> None:
        message = error(editor, "view", ten_lines, view_range=view_range)
        assert message == f"Invalid `view_range` parameter: {view_range}. {hint}"

    def test_cuts_what_is_too_long(self, tmp_path: Path) -> None:
        editor = FileEditor(str(tmp_path), max_output_chars=20)
        path = tmp_path / "a.txt"
        header = f"Here's the result of running `cat -n` on {path}:\n"
        path.write_text("abc\nde\n")
        assert run(editor, "view", path)["content"] == f"{header}     1\tabc\n     2\tde\n"
        for text in ["abc\ndef\n", "abc\nde\n\n"]:
            path.write_text(text)
            assert run(editor, "view", path)["content"] == f"{header}     1\tabc\n     2\tde{FILE_NOTICE}\n"

    def test_cuts_one_huge_line(self, editor: FileEditor, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_text("x" * 9_000_000)
        body = "     1\t" + "x" * (16000 - 7)
        header = f"Here's the result of running `cat -n` on {path}:\n"
        assert run(editor, "view", path)["content"] == header + body + FILE_NOTICE + "\n"


class TestViewDirectory:
    def test_lists_two_levels_without_what_is_hidden(self, editor: FileEditor, tmp_path: Path) -> None:
        for name in ["b/c/too_deep", "b/.hidden", "a.txt", ".git/config", ".env", "empty/.keep"]:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("")
        (tmp_path / "link").symlink_to("b")
        (tmp_path / "nowhere").symlink_to("gone")
        expected = (
            f"Here's the files and directories up to 2 levels deep in {tmp_path}, excluding hidden items:\n"
            f"{tmp_path}/\n{tmp_path}/a.txt\n{tmp_path}/b/\n{tmp_path}/b/c/\n{tmp_path}/empty/\n"
            f"{tmp_path}/link/\n{tmp_path}/link/c/\n{tmp_path}/nowhere\n\n"
            f"2 hidden files/directories in this directory are excluded. You can use 'ls -la {tmp_path}' to see them."
        )
        assert run(editor, "view", tmp_path)["content"] == expected
        assert run(editor, "view", f"{tmp_path}/")["content"] == expected

    def test_says_nothing_of_hidden_entries_where_there_are_none(self, editor: FileEditor, tmp_path: Path) -> None:
        assert run(editor, "view", tmp_path)["content"] == (
            f"Here's the files and directories up to 2 levels deep in {tmp_path}, excluding hidden items:\n{tmp_path}/"
        )

    def test_shows_a_name_that_is_no_text(self, editor: FileEditor, tmp_path: Path) -> None:
        (tmp_path / os.fsdecode(b"caf\xe9")).write_text("")
        assert run(editor, "view", tmp_path)["content"].endswith(f"\n{tmp_path}/caf\\udce9")

    def test_cuts_a_large_directory(self, editor: FileEditor, tmp_path: Path) -> None:
        for number in range(1000):
            (tmp_path / f"file_with_quite_a_long_name_{number:04}").write_text("")
        lines = [f"{tmp_path}/", *(f"{tmp_path}/file_with_quite_a_long_name_{number:04}" for number in range(1000))]
        content = run(editor, "view", tmp_path)["content"]
        assert content.endswith(":\n" + "\n".join(lines)[:16000] + DIRECTORY_NOTICE)

    def test_takes_no_range_and_no_edit(self, editor: FileEditor, tmp_path: Path) -> None:
        assert error(editor, "view", tmp_path, view_range=[1, 2]) == (
            "Invalid `view_range` parameter: [1, 2]. The `view_range` parameter is not allowed when `path` points to a "
            "directory."
        )
        for command in ["str_replace", "insert", "undo_edit"]:
            assert error(editor, command, tmp_path) == (
                f"Invalid `path` parameter: {tmp_path}. The path {tmp_path} is a directory and only the `view` command "
                "can be used on directories."
            )


PICTURES = {
    "a.png": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "image/png"),
    "b.JPG": (b"\xff\xd8\xff\xe0rest", "image/jpeg"),
    "c.gif": (b"GIF89arest", "image/gif"),
    "d.webp": (b"RIFF\0\0\0\0WEBPrest", "image/webp"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_shown(editor: FileEditor, tmp_path: Path, name: str) -> None:
    content, kind = PICTURES[name]
    (tmp_path / name).write_bytes(content)
    result = run(editor, "view", tmp_path / name)
    assert result["content"] == f"The picture {tmp_path / name} is shown."
    assert result["image_url"] == f"data:{kind};base64,{base64.b64encode(content).decode()}"
    seen = ReadFile().observe(FileReadAction(path=name), result)
    assert isinstance(seen, FileReadObservation)
    assert seen.image_urls == (result["image_url"],)


def test_what_is_only_named_like_a_picture_is_refused(editor: FileEditor, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"not one")
    assert "is not a PNG, JPEG, GIF or WebP" in error(editor, "view", tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(bytes(MAX_PICTURE_BYTES + 1))
    assert "ERROR" in run(editor, "view", tmp_path / "b.png")["content"]
