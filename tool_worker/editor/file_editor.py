r"""The tool `str_replace_editor`: view, create and edit text files, and undo the edits.

Rules, limits and wording are those of OpenHands (openhands-aci), on which models were trained.

Holds:
    - `run` answers every call with a result; whatever the model or the file system does wrong is a text that starts
      with `ERROR:` and says what to do.
    - All texts of a result are valid UTF-8, and `content` is bounded.
Does not:
    - Confine paths to the workspace: the sandbox around the workspace host does, for all tools alike.
    - Convert documents.
"""

from __future__ import annotations

import os
import stat

from tool_worker.editor.directory_listing import list_directory
from tool_worker.editor.editor_arguments import insert_line_number, line_range, optional_text, required_text
from tool_worker.editor.editor_errors import EditorError, EditRefusedError, InvalidParameterError, as_utf8, excerpt
from tool_worker.editor.picture import is_picture, picture_url
from tool_worker.editor.regular_file import find_status
from tool_worker.editor.text_diff import unified_diff
from tool_worker.editor.text_file import with_plain_breaks
from tool_worker.editor.versioned_files import VersionedFiles

SNIPPET_CONTEXT_LINES = 4
REPORTED_LINES_LIMIT = 100
DOCUMENT_SUFFIXES = (".docx", ".xlsx", ".pptx", ".pdf", ".mp3", ".wav", ".m4a", ".flac")

_CLIPPED_NOTICE = (
    "<response clipped><NOTE>Due to the max output limit, only part of this file has been shown to you. You should "
    "retry this tool after you have searched inside the file with `grep -n` in order to find the line numbers of what "
    "you are looking for.</NOTE>"
)


class FileEditor:
    """Edits files.

    Args:
        workspace: Absolute path of the directory in which a relative path was probably meant.
        files: Where their earlier versions are kept; None: by the editor alone.
        max_output_chars: Bound of the numbered lines, or of the directory list, in one result.
    """

    def __init__(self, workspace: str, files: VersionedFiles | None = None, *, max_output_chars: int = 16000) -> None:
        assert os.path.isabs(workspace), workspace
        self._workspace = workspace
        self._files = files or VersionedFiles()
        self._max_output_chars = max_output_chars
        self._commands = {
            "view": self._view,
            "create": self._create,
            "str_replace": self._str_replace,
            "insert": self._insert,
            "undo_edit": self._undo_edit,
        }

    def run(self, arguments: dict[str, object]) -> dict[str, object]:
        r"""Run one command.

        Idempotent: `view` only. Repeating an edit either fails or edits again.

        Args:
            arguments: `command` (view, create, str_replace, insert, undo_edit) and `path` (absolute); `file_text` for
                create; `old_str` and `new_str` (nothing if left out) for str_replace; `insert_line` (an integer or
                its decimal digits; 0 is before the first line) and `new_str` for insert; `view_range` ([first, last],
                counted from 1, -1 is the last line) for view. Other keys are ignored.

        Returns:
            `content` (what the model reads), `is_error`, `path`, `prev_exist` (whether something was there before);
            and after an edit `old_content` (None after create), `new_content` and `diff` (unified; "" if nothing
            changed), in which every line break is `\n`. These three are None after `view` and after an error.
        """
        path = str(arguments.get("path") or "")
        try:
            command = optional_text(arguments, "command")
            if command not in self._commands:
                raise EditRefusedError(
                    f"Unrecognized command {excerpt(str(command))}. The allowed commands for the str_replace_editor "
                    f"tool are: {', '.join(self._commands)}"
                )
            path = self._checked_path(command, required_text(arguments, "path", command))
            return self._commands[command](path, arguments)
        except EditorError as error:
            exists = path.startswith("/") and os.path.exists(path)
            return _result(f"ERROR:\n{error}", path, is_error=True, prev_exist=exists)

    def _checked_path(self, command: str, path: str) -> str:
        if not path.startswith("/"):
            hint = "The path should be an absolute path, starting with `/`."
            suggestion = os.path.join(self._workspace, path)
            if path and os.path.exists(suggestion):
                hint += f" Maybe you meant {suggestion}?"
            raise InvalidParameterError("path", path, hint)
        path = path.rstrip("/") or "/"
        status = find_status(path)
        if command == "create" and status:
            raise InvalidParameterError(
                "path", path, f"File already exists at: {path}. Cannot overwrite files using command `create`."
            )
        if command != "create" and not status:
            raise InvalidParameterError("path", path, f"The path {path} does not exist. Please provide a valid path.")
        if command == "view":
            return path
        if status and stat.S_ISDIR(status.st_mode):
            raise InvalidParameterError(
                "path", path, f"The path {path} is a directory and only the `view` command can be used on directories."
            )
        if _is_document(path):
            raise InvalidParameterError(
                "path",
                path,
                f"The path {path} points to a binary file ({os.path.splitext(path)[1]}) and only the `view` "
                "command can be used on supported binary files.",
            )
        return path

    def _view(self, path: str, arguments: dict[str, object]) -> dict[str, object]:
        view_range = arguments.get("view_range") or None
        if os.path.isdir(path):
            if view_range is not None:
                raise InvalidParameterError(
                    "view_range",
                    view_range,
                    "The `view_range` parameter is not allowed when `path` points to a directory.",
                )
            return _result(list_directory(path, self._max_output_chars), path)
        if _is_document(path):
            # Differs: no document is converted to Markdown, because the workspace host has the standard library only.
            raise EditRefusedError(
                f"Error in converting file to Markdown: the workspace has no converter. Please use Python code to read "
                f"{path}"
            )
        if is_picture(path):
            return {**_result(f"The picture {path} is shown.", path), "image_url": picture_url(path)}
        _, file = self._files.read(path)
        lines = _split(file.text)
        first, last, note = (1, len(lines), "") if view_range is None else line_range(view_range, len(lines))
        return _result(self._number(lines, first, last, path) + note, path)

    def _create(self, path: str, arguments: dict[str, object]) -> dict[str, object]:
        text = required_text(arguments, "file_text", "create")
        self._files.create(path, text)
        return _result(
            f"File created successfully at: {path}", path, prev_exist=False, new_content=with_plain_breaks(text)
        )

    def _str_replace(self, path: str, arguments: dict[str, object]) -> dict[str, object]:
        old_str = with_plain_breaks(required_text(arguments, "old_str", "str_replace"))
        new_str = with_plain_breaks(optional_text(arguments, "new_str") or "")
        content, file = self._files.read(path)
        if old_str not in file.text and old_str.strip():
            old_str, new_str = old_str.strip(), new_str.strip()
        if old_str == new_str:
            raise InvalidParameterError(
                "new_str", new_str, "No replacement was performed. `new_str` and `old_str` must be different."
            )
        position = _find_only(old_str, file.text, path)
        text = file.text[:position] + new_str + file.text[position + len(old_str) :]
        self._files.change(path, content, file, text)
        first = text.count("\n", 0, position) + 1
        snippet = self._number_around(text, first, first + new_str.count("\n"), f"a snippet of {path}")
        return _result(
            f"The file {path} has been edited. {snippet}"
            "Review the changes and make sure they are as expected. Edit the file again if necessary.",
            path,
            old_content=file.text,
            new_content=text,
        )

    def _insert(self, path: str, arguments: dict[str, object]) -> dict[str, object]:
        content, file = self._files.read(path)
        line_number = insert_line_number(arguments, len(_split(file.text)) if file.text else 0)
        new_str = with_plain_breaks(required_text(arguments, "new_str", "insert"))
        # Differs: a last line without a break gets one before a line is added to it, because the two would be glued.
        lines = file.text.split("\n", line_number)
        lines.insert(line_number, new_str)
        text = "\n".join(lines)
        self._files.change(path, content, file, text)
        first = line_number + 1
        snippet = self._number_around(text, first, first + new_str.count("\n"), "a snippet of the edited file")
        return _result(
            f"The file {path} has been edited. {snippet}"
            "Review the changes and make sure they are as expected (correct indentation, no duplicate lines, etc). "
            "Edit the file again if necessary.",
            path,
            old_content=file.text,
            new_content=text,
        )

    def _undo_edit(self, path: str, _arguments: dict[str, object]) -> dict[str, object]:
        file, earlier = self._files.restore(path)
        lines = _split(earlier.text)
        return _result(
            f"Last edit to {path} undone successfully. {self._number(lines, 1, len(lines), path)}",
            path,
            old_content=file.text,
            new_content=earlier.text,
        )

    def _number_around(self, text: str, first: int, last: int, description: str) -> str:
        lines = _split(text)
        first = max(1, first - SNIPPET_CONTEXT_LINES)
        last = min(len(lines), last + SNIPPET_CONTEXT_LINES)
        return self._number(lines, first, last, description)

    def _number(self, lines: list[str], first: int, last: int, description: str) -> str:
        numbered = []
        length = -1  # the last line is joined without a break
        for number in range(first, last + 1):
            # Differs: the limit covers the numbers too, because of files with many short lines. Long lines are cut
            # before they are joined: they may have a thousand times the length of what can be shown.
            numbered.append(f"{number:6}\t{lines[number - 1][: self._max_output_chars]}")
            length += len(numbered[-1]) + 1
            if length > self._max_output_chars:
                break
        body = "\n".join(numbered)
        if len(body) > self._max_output_chars:
            body = body[: self._max_output_chars] + _CLIPPED_NOTICE
        return f"Here's the result of running `cat -n` on {description}:\n{body}\n"


def _split(text: str) -> list[str]:
    """The lines of a text without their breaks; an empty text is one empty line."""
    # Differs: a line break at the end starts no further, empty line, because models take it for one that they can edit.
    lines = text.split("\n")
    if len(lines) > 1 and not lines[-1]:
        lines.pop()
    return lines


def _find_only(old_str: str, text: str, path: str) -> int:
    """Position of the only occurrence of `old_str`."""
    position = text.find(old_str)
    if position < 0:
        raise EditRefusedError(
            f"No replacement was performed, old_str `{excerpt(old_str)}` did not appear verbatim in {path}."
        )
    # Differs: overlapping occurrences count, because which of them was meant is just as open.
    if text.find(old_str, position + 1) < 0:
        return position
    lines: list[int] = []
    line_start = 0
    line = 1
    while position >= 0 and len(lines) <= REPORTED_LINES_LIMIT:
        line += text.count("\n", line_start, position)
        lines.append(line)
        line_start = text.find("\n", position) + 1
        line += 1
        position = text.find(old_str, line_start) if line_start else -1
    shown = ", ".join(map(str, lines[:REPORTED_LINES_LIMIT])) + (", ..." if len(lines) > REPORTED_LINES_LIMIT else "")
    raise EditRefusedError(
        f"No replacement was performed. Multiple occurrences of old_str `{excerpt(old_str)}` in lines [{shown}]. "
        "Please ensure it is unique."
    )


def _is_document(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in DOCUMENT_SUFFIXES


def _result(
    content: str,
    path: str,
    *,
    is_error: bool = False,
    prev_exist: bool = True,
    old_content: str | None = None,
    new_content: str | None = None,
) -> dict[str, object]:
    return {
        "content": as_utf8(content),
        "is_error": is_error,
        "path": excerpt(as_utf8(path)),
        "prev_exist": prev_exist,
        "old_content": old_content,
        "new_content": new_content,
        "diff": None if new_content is None else unified_diff(old_content or "", new_content, path),
    }
