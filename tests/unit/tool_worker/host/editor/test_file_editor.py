"""What the editing commands of the file editor do and say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.editor_parts import error, run
from tool_worker.host.editor.file_editor import FileEditor


class TestCreate:
    def test_writes_the_text_as_it_is(self, editor: FileEditor, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
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

    def test_needs_a_text_which_may_be_empty(self, editor: FileEditor, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
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
    def test_deletes_without_a_new_text(self, editor: FileEditor, tmp_path: Path, arguments: dict[str, Any]) -> None:
        path = tmp_path / "a.txt"
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
        self, editor: FileEditor, tmp_path: Path, text: str, old_str: str, lines: str
    ) -> None:
        path = tmp_path / "a.txt"
        path.write_text(text)
        assert error(editor, "str_replace", path, old_str=old_str, new_str="new") == (
            f"No replacement was performed. Multiple occurrences of old_str `{old_str}` in lines {lines}. Please "
            "ensure it is unique."
        )
        assert path.read_text() == text

    def test_takes_blanks_off_if_the_text_is_not_found(self, editor: FileEditor, tmp_path: Path) -> None:
        path = tmp_path / "a.py"
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
        ],
    )
    def test_keeps_blanks_of_the_new_text_that_the_old_lacks(
        self, editor: FileEditor, tmp_path: Path, text: str, old_str: str, new_str: str, after: str
    ) -> None:
        path = tmp_path / "a.py"
        path.write_text(text)
        run(editor, "str_replace", path, old_str=old_str, new_str=new_str)
        assert path.read_text() == after

    def test_keeps_blanks_of_the_new_text_everywhere(self, editor: FileEditor, tmp_path: Path) -> None:
        path = tmp_path / "a.py"
        path.write_text("  f()\n    f()\n")
        run(editor, "str_replace", path, old_str="    f() \n", new_str="        f() \n", replace_all=True)
        assert path.read_text() == "      f()\n        f()\n"

    @pytest.mark.parametrize(
        ("old_str", "quoted"), [("three", "three"), (" three\n", "three"), ("   ", "   "), ("ONE", "ONE")]
    )
    def test_says_what_is_not_found(self, editor: FileEditor, tmp_path: Path, old_str: str, quoted: str) -> None:
        path = tmp_path / "a.txt"
        path.write_text("one\ntwo\n")
        assert error(editor, "str_replace", path, old_str=old_str, new_str="x") == (
            f"No replacement was performed, old_str `{quoted}` did not appear verbatim in {path}."
        )

    @pytest.mark.parametrize(("old_str", "new_str"), [("one", "one"), ("one\r\n", "one\n"), ("  one", "one")])
    def test_refuses_a_replacement_by_the_same(
        self, editor: FileEditor, tmp_path: Path, old_str: str, new_str: str
    ) -> None:
        path = tmp_path / "a.txt"
        path.write_text("one\ntwo\n")
        assert error(editor, "str_replace", path, old_str=old_str, new_str=new_str) == (
            f"Invalid `new_str` parameter: {new_str}. No replacement was performed. `new_str` and `old_str` must be "
            "different."
        )

    def test_fills_an_empty_file(self, editor: FileEditor, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
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
        self, editor: FileEditor, tmp_path: Path, text: str, line: object, new_str: str, expected: str
    ) -> None:
        path = tmp_path / "a.txt"
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
    def test_goes_back_edit_by_edit(self, editor: FileEditor, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
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

    def test_goes_back_to_the_created_text_but_not_beyond(self, editor: FileEditor, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
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

    def test_does_not_undo_over_what_another_program_wrote_since(self, editor: FileEditor, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
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
