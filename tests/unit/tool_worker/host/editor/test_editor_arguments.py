"""What the file editor makes of odd arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.editor_parts import error, run
from tool_worker.host.editor.file_editor import FileEditor


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
