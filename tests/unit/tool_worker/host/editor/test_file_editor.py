"""The file editor: commands, output, and odd arguments."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker.contract.file_events import FileReadAction, FileReadObservation
from tests.editor_parts import error, run
from tests.trees import write_files
from tool_worker.host.editor.file_editor import FileEditor
from tool_worker.host.editor.file_tools import FileTools
from tool_worker.host.editor.patching import COMPARED_LINES_LIMIT
from tool_worker.host.editor.replacements import SPANS_LIMIT, Replacement, apply_replacements
from tool_worker.host.text_files.file_errors import EditRefusedError
from tool_worker.host.text_files.regular_file import MAX_PICTURE_BYTES
from tool_worker.host.text_files.text_file import TextFile
from tool_worker.tools.file_tools import ReadFile


class TestCreate:
    def test_writes_the_text_as_it_is(self, editor: FileEditor, path: Path) -> None:
        assert run(editor, "create", path, file_text="grün\r\nend") == {
            "content": f"File created successfully at: {path}",
            "is_error": False,
            "path": str(path),
            "prev_exist": False,
            "old_content": None,
            "new_content": "grün\nend",
            "diff": f"--- {path}\n+++ {path}\n@@ -0,0 +1,2 @@\n+grün\n+end\n\\ No newline at end of file\n",
        }
        assert path.read_bytes() == b"gr\xc3\xbcn\r\nend"

    def test_never_overwrites(self, editor: FileEditor, ten_lines: Path) -> None:
        before = ten_lines.read_bytes()
        assert error(editor, "create", ten_lines, file_text="x") == (
            f"Invalid `path` parameter: {ten_lines}. File already exists at: {ten_lines}. Cannot overwrite files using "
            "command `create`. Set `overwrite` to true to replace its whole content."
        )
        assert ten_lines.read_bytes() == before

    def test_needs_a_text_which_may_be_empty(self, editor: FileEditor, path: Path) -> None:
        assert error(editor, "create", path) == "Parameter `file_text` is required for command: create."
        assert not path.exists()
        assert run(editor, "create", path, file_text="")["diff"] == ""
        assert path.read_bytes() == b""


class TestStrReplace:
    def test_replaces_and_shows_four_lines_around(self, editor: FileEditor, ten_lines: Path) -> None:
        old = ten_lines.read_text()
        new = old.replace("line 6\n", "six\nand a half\n")
        assert run(editor, "str_replace", ten_lines, old_str="line 6", new_str="six\nand a half") == {
            "content": f"The file {ten_lines} has been edited. Here's the result of running `cat -n` on a snippet of "
            f"{ten_lines}:\n     2\tline 2\n     3\tline 3\n     4\tline 4\n     5\tline 5\n     6\tsix\n"
            "     7\tand a half\n     8\tline 7\n     9\tline 8\n    10\tline 9\n    11\tline 10\n"
            "Review the changes and make sure they are as expected. Edit the file again if necessary.",
            "is_error": False,
            "path": str(ten_lines),
            "prev_exist": True,
            "old_content": old,
            "new_content": new,
            "diff": f"--- {ten_lines}\n+++ {ten_lines}\n@@ -3,7 +3,8 @@\n line 3\n line 4\n line 5\n-line 6\n+six\n"
            "+and a half\n line 7\n line 8\n line 9\n",
        }
        assert ten_lines.read_text() == new

    @pytest.mark.parametrize("arguments", [{}, {"new_str": None}, {"new_str": ""}])
    def test_deletes_without_a_new_text(self, editor: FileEditor, path: Path, arguments: dict[str, Any]) -> None:
        path.write_text("one\ntwo\n")
        content = run(editor, "str_replace", path, old_str="two\n", **arguments)["content"]
        assert "     1\tone\nReview the changes" in content
        assert path.read_text() == "one\n"

    @pytest.mark.parametrize(
        ("text", "old_str", "lines"),
        [
            ("a\nb\na\n", "a", "[1, 3]"),
            ("aa\nb\n", "a", "[1]"),
            ("x\n}\n}\n}\n", "}\n}", "[2, 3]"),  # overlapping
            ("a\nb\na\nb\n", "a\nb", "[1, 3]"),
            ("a\nb", "", "[1, 2]"),
            ("a\n" * 101, "a", f"[{', '.join(map(str, range(1, 101)))}, ...]"),
        ],
    )
    def test_refuses_more_than_one_place(
        self, editor: FileEditor, path: Path, text: str, old_str: str, lines: str
    ) -> None:
        path.write_text(text)
        assert error(editor, "str_replace", path, old_str=old_str, new_str="new") == (
            f"No replacement was performed. Multiple occurrences of old_str `{old_str}` in lines {lines}. Please "
            "ensure it is unique."
        )
        assert path.read_text() == text

    def test_takes_blanks_off_if_the_text_is_not_found(self, editor: FileEditor, path: Path) -> None:
        path.write_text("def f():\n    return 1\n")
        run(editor, "str_replace", path, old_str="\n  return 1  \n", new_str="\n  return 2  \n")
        assert path.read_text() == "def f():\n    return 2\n"

    @pytest.mark.parametrize(
        ("text", "old_str", "new_str", "after"),
        [
            ("f()\n", "f() \n", "    f()\n", "    f()\n"),
            ("f()\n", "f() ", "f()\n\n", "f()\n\n\n"),
            ("if a:\n\tf()\n", "    f()\n", "        f()\n", "if a:\n\t    f()\n"),
            ("if a:\n\tf()\n", "    f()\n", "  g()\n", "if a:\n\tg()\n"),
            ("    f()\n", "\n    f()\n", "    if a:\n        f()\n", "    if a:\n        f()\n"),
            ("    f()\n", "\n    f()\n", "\n        f()\n", "        f()\n"),
            ("    f()\n", "        f()\n", "        g()\n", "    g()\n"),
            ("f()", "f()\n", "f()\n\n    g()\n", "f()\n\n    g()"),
            ("a\nb", "  a\n", "", "b"),
            ("f:\n    a\n    b\n", "  \n    a\n", "    a\n    c\n", "f:\n    a\n    c\n    b\n"),
            ("f:\n    a\n    b\n", "  \n    a\n", "  \n      a\n", "f:\n      a\n    b\n"),
            ("f:\n    a\n    b\n", "    a\n  \n", "    a\n    c\n", "f:\n    a\n    c\n    b\n"),
            ("f:\n    a\n    b\n", "    a\n  \n", "    c\n  \n", "f:\n    c\n    b\n"),
            ("f:\n    a\n    b\n", "\n\n    a\n\n", "    a\n    c\n", "f:\n    a\n    c\n    b\n"),
        ],
    )
    def test_keeps_blanks_of_the_new_text_that_the_old_lacks(
        self, editor: FileEditor, path: Path, text: str, old_str: str, new_str: str, after: str
    ) -> None:
        path.write_text(text)
        run(editor, "str_replace", path, old_str=old_str, new_str=new_str)
        assert path.read_text() == after

    def test_keeps_blanks_of_the_new_text_everywhere(self, editor: FileEditor, path: Path) -> None:
        path.write_text("  f()\n    f()\n")
        run(editor, "str_replace", path, old_str="    f() \n", new_str="        f() \n", replace_all=True)
        assert path.read_text() == "      f()\n        f()\n"

    @pytest.mark.parametrize(
        ("old_str", "quoted"), [("three", "three"), (" three\n", "three"), ("   ", "   "), ("ONE", "ONE")]
    )
    def test_says_what_is_not_found(self, editor: FileEditor, path: Path, old_str: str, quoted: str) -> None:
        path.write_text("one\ntwo\n")
        assert error(editor, "str_replace", path, old_str=old_str, new_str="x") == (
            f"No replacement was performed, old_str `{quoted}` did not appear verbatim in {path}."
        )

    @pytest.mark.parametrize(("old_str", "new_str"), [("one", "one"), ("one\r\n", "one\n"), ("  one", "one")])
    def test_refuses_a_replacement_by_the_same(
        self, editor: FileEditor, path: Path, old_str: str, new_str: str
    ) -> None:
        path.write_text("one\ntwo\n")
        assert error(editor, "str_replace", path, old_str=old_str, new_str=new_str) == (
            f"Invalid `new_str` parameter: {new_str}. No replacement was performed. `new_str` and `old_str` must be "
            "different."
        )

    def test_fills_an_empty_file(self, editor: FileEditor, path: Path) -> None:
        path.write_text("")
        assert error(editor, "str_replace", path) == "Parameter `old_str` is required for command: str_replace."
        run(editor, "str_replace", path, old_str="", new_str="one\n")
        assert path.read_text() == "one\n"

    def test_quotes_a_long_text_in_part(self, editor: FileEditor, ten_lines: Path) -> None:
        message = error(editor, "str_replace", ten_lines, old_str="x" * 1_000_000, new_str="y")
        half = "x" * 2048
        assert message == (
            f"No replacement was performed, old_str `{half}... [995904 characters left out] ...{half}` did not appear "
            f"verbatim in {ten_lines}."
        )


class TestInsert:
    @pytest.mark.parametrize(
        ("text", "line", "new_str", "expected"),
        [
            ("a\nb\n", 0, "x", "x\na\nb\n"),
            ("a\nb\n", 1, "x\ny", "a\nx\ny\nb\n"),
            ("a\nb\n", 2, "x", "a\nb\nx\n"),
            ("a\nb\n", "1", "x", "a\nx\nb\n"),
            ("a\nb", 1, "x", "a\nx\nb"),
            ("a\nb", 2, "x", "a\nb\nx"),
            ("a\n", 1, "x\n", "a\nx\n\n"),
            ("a\n", 1, "", "a\n\n"),
            ("", 0, "x", "x\n"),
        ],
    )
    def test_inserts_whole_lines(
        self, editor: FileEditor, path: Path, text: str, line: object, new_str: str, expected: str
    ) -> None:
        path.write_text(text)
        result = run(editor, "insert", path, insert_line=line, new_str=new_str)
        assert (result["old_content"], result["new_content"]) == (text, expected)
        assert path.read_text() == expected

    def test_shows_four_lines_around(self, editor: FileEditor, ten_lines: Path) -> None:
        content = run(editor, "insert", ten_lines, insert_line=5, new_str="x\ny")["content"]
        assert content == (
            f"The file {ten_lines} has been edited. Here's the result of running `cat -n` on a snippet of the edited "
            "file:\n     2\tline 2\n     3\tline 3\n     4\tline 4\n     5\tline 5\n     6\tx\n     7\ty\n"
            "     8\tline 6\n     9\tline 7\n    10\tline 8\n    11\tline 9\n"
            "Review the changes and make sure they are as expected (correct indentation, no duplicate lines, etc). "
            "Edit the file again if necessary."
        )

    @pytest.mark.parametrize("line", ["three", "", "1.5", "9" * 5000, 1.5, True, [1]])
    def test_needs_an_integer(self, editor: FileEditor, ten_lines: Path, line: object) -> None:
        message = error(editor, "insert", ten_lines, insert_line=line, new_str="x")
        assert message.startswith("Invalid insert_line value: '")
        assert message.endswith("'. Expected an integer.")

    @pytest.mark.parametrize("line", [-1, 11, "-1", 10**30])
    def test_stays_within_the_file(self, editor: FileEditor, ten_lines: Path, line: object) -> None:
        assert error(editor, "insert", ten_lines, insert_line=line, new_str="x") == (
            f"Invalid `insert_line` parameter: {line}. It should be within the range of allowed values: [0, 10]"
        )

    def test_needs_line_and_text(self, editor: FileEditor, ten_lines: Path) -> None:
        assert error(editor, "insert", ten_lines, new_str="x") == (
            "Parameter `insert_line` is required for command: insert."
        )
        assert error(editor, "insert", ten_lines, insert_line=1) == (
            "Parameter `new_str` is required for command: insert."
        )


class TestUndo:
    def test_goes_back_edit_by_edit(self, editor: FileEditor, path: Path) -> None:
        path.write_text("one\n")
        run(editor, "str_replace", path, old_str="one", new_str="two")
        run(editor, "insert", path, insert_line=1, new_str="three")
        assert run(editor, "undo_edit", path)["new_content"] == "two\n"
        assert run(editor, "undo_edit", path) == {
            "content": f"Last edit to {path} undone successfully. Here's the result of running `cat -n` on {path}:\n"
            "     1\tone\n",
            "is_error": False,
            "path": str(path),
            "prev_exist": True,
            "old_content": "two\n",
            "new_content": "one\n",
            "diff": f"--- {path}\n+++ {path}\n@@ -1 +1 @@\n-two\n+one\n",
        }
        assert path.read_text() == "one\n"
        assert error(editor, "undo_edit", path) == f"No edit history found for {path}."

    def test_goes_back_to_the_created_text_but_not_beyond(self, editor: FileEditor, path: Path) -> None:
        run(editor, "create", path, file_text="one\n")
        run(editor, "str_replace", path, old_str="one", new_str="two")
        for _ in range(2):
            run(editor, "undo_edit", path)
            assert path.read_text() == "one\n"
        assert error(editor, "undo_edit", path) == f"No edit history found for {path}."

    def test_keeps_ten_versions_of_each_file(self, editor: FileEditor, tmp_path: Path) -> None:
        paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
        for path in paths:
            path.write_text("version 0")
            for number in range(12):
                run(editor, "str_replace", path, old_str=f"version {number}", new_str=f"version {number + 1}")
        for path in paths:
            for _ in range(10):
                run(editor, "undo_edit", path)
            assert path.read_text() == "version 2"
            assert error(editor, "undo_edit", path) == f"No edit history found for {path}."

    def test_does_not_undo_over_what_another_program_wrote_since(self, editor: FileEditor, path: Path) -> None:
        path.write_text("one\n")
        run(editor, "str_replace", path, old_str="one", new_str="two")
        path.write_text("two\nand a line of a formatter\n")
        assert error(editor, "undo_edit", path) == (
            f"The last edit to {path} was not undone: a command or another program has changed the file since, and "
            "undoing would lose that change. View the file, and take your edit back with `str_replace`."
        )
        assert path.read_text() == "two\nand a line of a formatter\n"
        path.write_text("two\n")
        run(editor, "undo_edit", path)
        assert path.read_text() == "one\n"

    def test_knows_a_file_by_each_of_its_names(self, editor: FileEditor, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("one")
        (tmp_path / "link").symlink_to("a.txt")
        run(editor, "str_replace", tmp_path / "link", old_str="one", new_str="two")
        run(editor, "undo_edit", tmp_path / "a.txt")
        assert (tmp_path / "a.txt").read_text() == "one"


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
    def test_numbers_lines(self, editor: FileEditor, path: Path) -> None:
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
    def test_shows_no_text_as_one_empty_line(self, editor: FileEditor, path: Path, text: str) -> None:
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

    def test_cuts_one_huge_line(self, editor: FileEditor, path: Path) -> None:
        path.write_text("x" * 9_000_000)
        body = "     1\t" + "x" * (16000 - 7)
        header = f"Here's the result of running `cat -n` on {path}:\n"
        assert run(editor, "view", path)["content"] == header + body + FILE_NOTICE + "\n"


class TestViewDirectory:
    def test_lists_two_levels_without_what_is_hidden(self, editor: FileEditor, tmp_path: Path) -> None:
        names = ["b/c/too_deep", "b/.hidden", "a.txt", ".git/config", ".env", "empty/.keep"]
        write_files(tmp_path, dict.fromkeys(names, ""))
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


def test_file_with_only_a_picture_s_name_is_refused(editor: FileEditor, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"not one")
    assert "is not a PNG, JPEG, GIF or WebP" in error(editor, "view", tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(bytes(MAX_PICTURE_BYTES + 1))
    assert "ERROR" in run(editor, "view", tmp_path / "b.png")["content"]


class TestArguments:
    @pytest.mark.parametrize("arguments", [{"command": "remove"}, {"command": None}, {}])
    def test_knows_its_commands(self, editor: FileEditor, arguments: dict[str, object]) -> None:
        result = editor.run({"path": "/", **arguments})
        assert result["content"] == (
            f"ERROR:\nUnrecognized command {arguments.get('command')}. The allowed commands for the str_replace_editor "
            "tool are: view, create, str_replace, insert, undo_edit, replace_cell, insert_cell, delete_cell"
        )

    def test_needs_a_path(self, editor: FileEditor) -> None:
        for command in ["view", "create", "str_replace", "insert", "undo_edit"]:
            content = editor.run({"command": command})["content"]
            assert content == f"ERROR:\nParameter `path` is required for command: {command}."

    def test_suggests_an_absolute_path(self, editor: FileEditor, tmp_path: Path, ten_lines: Path) -> None:
        (tmp_path / "src").mkdir()
        hint = "The path should be an absolute path, starting with `/`."
        assert error(editor, "view", "ten.txt") == (
            f"Invalid `path` parameter: ten.txt. {hint} Maybe you meant {ten_lines}?"
        )
        assert error(editor, "view", "src") == f"Invalid `path` parameter: src. {hint} Maybe you meant {tmp_path}/src?"
        assert error(editor, "view", "gone.txt") == f"Invalid `path` parameter: gone.txt. {hint}"
        assert error(editor, "create", "~/a", file_text="") == f"Invalid `path` parameter: ~/a. {hint}"
        assert error(editor, "view", "") == f"Invalid `path` parameter: . {hint}"

    @pytest.mark.parametrize("command", ["view", "str_replace", "insert", "undo_edit"])
    def test_needs_something_at_the_path(self, editor: FileEditor, ten_lines: Path, command: str) -> None:
        for path in [ten_lines.parent / "gone.txt", ten_lines / "below_a_file"]:
            assert error(editor, command, path) == (
                f"Invalid `path` parameter: {path}. The path {path} does not exist. Please provide a valid path."
            )

    def test_says_whether_something_was_there(self, editor: FileEditor, ten_lines: Path) -> None:
        assert run(editor, "str_replace", ten_lines, old_str="gone", new_str="x")["prev_exist"] is True
        assert run(editor, "view", f"{ten_lines}.gone")["prev_exist"] is False

    @pytest.mark.parametrize("value", [7, 1.5, True, ["x"], {"a": 1}])
    def test_refuses_what_is_no_text(self, editor: FileEditor, ten_lines: Path, value: object) -> None:
        hint = "It should be a string."
        assert error(editor, "create", f"{ten_lines}.new", file_text=value) == (
            f"Invalid `file_text` parameter: {value}. {hint}"
        )
        assert error(editor, "str_replace", ten_lines, old_str=value) == f"Invalid `old_str` parameter: {value}. {hint}"
        assert editor.run({"command": "view", "path": value})["content"] == (
            f"ERROR:\nInvalid `path` parameter: {value}. {hint}"
        )

    def test_refuses_what_no_file_can_hold(self, editor: FileEditor, ten_lines: Path) -> None:
        before = ten_lines.read_bytes()
        assert error(editor, "insert", ten_lines, insert_line=0, new_str="a\0b") == (
            "Invalid `new_str` parameter: a\0b. It holds a NUL character, which a text file cannot. Use bash to write "
            "binary files."
        )
        assert error(editor, "str_replace", ten_lines, old_str="line 1\n", new_str="\ud83d") == (
            "Invalid `new_str` parameter: \\ud83d. It holds the lone surrogate U+D83D, which no file can. Send the "
            "whole character."
        )
        assert ten_lines.read_bytes() == before
        assert error(editor, "view", "/a\0b").startswith("Invalid `path` parameter: /a\0b. It holds a NUL character")
        assert error(editor, "view", "/\udc80").startswith("Invalid `path` parameter: /\\udc80. It holds the lone surr")

    @pytest.mark.parametrize("suffix", [".docx", ".xlsx", ".pptx", ".pdf", ".mp3", ".wav", ".m4a", ".flac", ".PDF"])
    def test_leaves_documents_alone(self, editor: FileEditor, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"a{suffix}"
        refusal = (
            f"Invalid `path` parameter: {path}. The path {path} points to a binary file ({suffix}) and only the `view` "
            "command can be used on supported binary files."
        )
        assert error(editor, "create", path, file_text="x") == refusal
        path.write_bytes(b"%PDF-1.7\n")
        assert error(editor, "str_replace", path, old_str="7", new_str="8") == refusal
        assert error(editor, "view", path) == (
            "Error in converting file to Markdown: the workspace has no converter. Please use Python code to read "
            f"{path}"
        )
        assert path.read_bytes() == b"%PDF-1.7\n"

    def test_bounds_every_message(self, editor: FileEditor, ten_lines: Path) -> None:
        long = "x" * 1_000_000
        calls = [
            {"command": long, "path": "/"},
            {"command": "view", "path": long},
            {"command": "view", "path": "/" + long},
            {"command": "view", "path": str(ten_lines), "view_range": [long]},
            {"command": "insert", "path": str(ten_lines), "insert_line": long, "new_str": long},
            {"command": "str_replace", "path": str(ten_lines), "old_str": long, "new_str": long},
            {"command": "create", "path": f"{ten_lines}.new", "file_text": [long]},
        ]
        for call in calls:
            result = editor.run(call)
            assert result["is_error"] is True
            assert len(str(result)) < 16000


def everywhere(old: str, new: str) -> Replacement:
    return Replacement(old, new, is_everywhere=True)


def test_a_text_cannot_be_doubled_until_memory_is_full() -> None:
    with pytest.raises(EditRefusedError, match="would have"):
        apply_replacements("a" * 1_000, [everywhere("a", "aa")] * 40, "/f")


def test_of_many_replacements_only_the_first_places_are_kept() -> None:
    text, spans = apply_replacements("x\n" * 50_000, [everywhere("x", "y")], "/f")
    assert (text, len(spans)) == ("y\n" * 50_000, SPANS_LIMIT)


def patched(folder: Path, patch: str) -> dict[str, object]:
    return FileTools(str(folder)).run("patch", {"patch": patch, "cwd": str(folder)})


def test_patch_does_not_change_a_file_and_its_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").symlink_to("a")
    begin = "*** Begin Patch\n"
    both = "".join(f"*** Update File: {name}\n@@\n-{old}\n+new\n" for name, old in (("a", "one"), ("b", "two")))
    done = patched(tmp_path, f"{begin}{both}*** End Patch\n")
    assert (done["is_error"], "twice" in str(done["content"])) == (True, True)
    assert (tmp_path / "a").read_text() == "one\ntwo\n"
    assert patched(tmp_path, f"{begin}*** Delete File: b\n*** End Patch\n")["is_error"]
    assert (tmp_path / "b").is_symlink()


def test_a_patch_that_compares_too_much_is_refused(tmp_path: Path) -> None:
    lines = 100_000
    (tmp_path / "long").write_text("line\n" * lines)
    chunks = "@@\n line\n+x\n" * (COMPARED_LINES_LIMIT // lines + 2)
    done = patched(tmp_path, f"*** Begin Patch\n*** Update File: long\n{chunks}*** End Patch\n")
    assert (done["is_error"], "several patches" in str(done["content"])) == (True, True)


@pytest.mark.parametrize(
    ("text", "chunk", "after"),
    [
        ("    a\n    b\n", " a\n-b\n+if x:\n+    b\n+\n+c", "    a\n    if x:\n        b\n\n    c\n"),
        ("\ta\n\tb\n", " a\n-b\n+c", "\ta\n\tc\n"),
        ("      a\n        b\n", "   a\n-    b\n+    c", "      a\n        c\n"),
        ("    a\nb\n", " a\n-b\n+c", "    a\nc\n"),
        ("\ta\n\tb\n", "     a\n-    b\n+    c", "\ta\n    c\n"),
        ("a  \nb\n", " a\n-b\n+ c", "a  \n c\n"),
    ],
)
def test_added_lines_of_a_patch_take_the_files_indentation(tmp_path: Path, text: str, chunk: str, after: str) -> None:
    (tmp_path / "a").write_text(text)
    done = patched(tmp_path, f"*** Begin Patch\n*** Update File: a\n@@\n{chunk}\n*** End Patch\n")
    assert (done["is_error"], (tmp_path / "a").read_text()) == (False, after)


LINE_BREAKS = st.sampled_from(["\n", "\r\n", "\r"])
CODES = st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "cp1252", "latin-1"])
LINES = st.lists(st.text("aé€", max_size=3), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3)
)


@given(
    st.binary() | st.text("aé€\r\n\0\x01").map(str.encode) | st.text("aé\r\n").map(lambda text: text.encode("cp1252"))
)
@example(b"\xff\xfea\0\r\0\n\0")
@example(b"\xef\xbb\xbf\xef\xbb\xbfa\r")
def test_a_file_that_is_text_survives_decoding(content: bytes) -> None:
    file = TextFile.decode(content)
    if file is None:
        assert b"\0" in content or not is_utf_8(content)
    else:
        assert file.encode(file.text) == content
        assert "\r" not in file.text


def is_utf_8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@given(st.text("ab\r\n", max_size=20), st.text("ab\n", max_size=20))
@example("a\rb\n\nc", "a\n\nc")
def test_an_edited_text_is_read_back_whatever_its_line_breaks(original: str, edited: str) -> None:
    file = TextFile.decode(original.encode())
    assert file
    reread = TextFile.decode(file.encode(edited))
    assert reread
    assert reread.text == edited


@given(st.lists(st.tuples(st.text("ab", max_size=2), st.sampled_from(["\n", "\r\n"])), min_size=1), st.integers(0))
def test_lines_that_were_not_edited_keep_their_bytes(lines: list[tuple[str, str]], place: int) -> None:
    place %= len(lines)
    file = TextFile.decode("".join(line + line_break for line, line_break in lines).encode())
    assert file
    edited = [line for line, _ in lines]
    edited[place] = "new"
    written = file.encode("".join(line + "\n" for line in edited)).split(b"\n")[:-1]
    for index, (line, line_break) in enumerate(lines):
        if index != place:
            assert written[index] + b"\n" == (line + line_break).encode()


@given(
    st.dictionaries(
        st.sampled_from(["command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range"]), JSON
    ),
    st.sampled_from(["view", "create", "str_replace", "insert", "undo_edit"]) | st.none(),
    st.sampled_from(["a.txt", "b.txt", "", "a.txt/b", "../a.txt"]) | st.none() | st.text(max_size=5),
)
def test_every_call_is_answered(arguments: dict[str, object], command: str | None, name: str | None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "a.txt").write_bytes(b"one\r\ntwo")
        if command is not None:
            arguments["command"] = command
        if name is not None:
            arguments["path"] = f"{directory}/{name}"
        result = FileEditor(directory).run(arguments)
    json.dumps(result, ensure_ascii=False).encode()
    assert set(result) == {"content", "is_error", "path", "prev_exist", "old_content", "new_content", "diff"}
    assert result["is_error"] == str(result["content"]).startswith("ERROR:\n")
