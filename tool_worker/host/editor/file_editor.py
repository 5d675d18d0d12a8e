"""The tool `str_replace_editor`: view, create and edit text files, and undo the edits.

Rules, limits and wording are those of OpenHands (openhands-aci), on which models were trained.

A directory is shown to two levels; hidden entries are counted and left out.

Holds:
    - `run` answers every call with a result. Every error of the model or the file system becomes a text that starts
      with `ERROR:` and names the next step.
    - All texts of a result are valid UTF-8, and `content` is bounded.
    - The text and the memory of a listing are bounded, however large the directories are.
Does not:
    - Confine paths to the workspace; the sandbox around the workspace host does this for all tools.
    - Convert documents.
    - Define which part of a directory is shown if the listing is too large.
"""

from __future__ import annotations

import os
import stat

from tool_worker.host.editor.editor_arguments import optional_text, parse_insert_line, parse_line_range, require_text
from tool_worker.host.editor.replacements import SPANS_LIMIT, Replacement, Span, apply_replacements, parse_replacements
from tool_worker.host.text_files.file_errors import (
    EditorError,
    EditRefusedError,
    FileAccessError,
    InvalidParameterError,
    as_utf8,
    excerpt,
)
from tool_worker.host.text_files.regular_file import find_status, is_picture, make_parents, picture_url
from tool_worker.host.text_files.text_file import TextFile, render_unified_diff, with_plain_breaks
from tool_worker.host.text_files.versioned_files import SeenFiles, VersionedFiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tool_worker.host.editor.notebook import JupyterNotebook

SNIPPET_CONTEXT_LINES = 4
SNIPPETS_LIMIT = 10
CELL_COMMANDS = ("replace_cell", "insert_cell", "delete_cell")
NOTEBOOK_ENDING = ".ipynb"
DOCUMENT_SUFFIXES = (".docx", ".xlsx", ".pptx", ".pdf", ".mp3", ".wav", ".m4a", ".flac")

_CLIPPED_NOTICE = (
    "<response clipped><NOTE>Due to the max output limit, only part of this file has been shown to you. You should "
    "retry this tool after you have searched inside the file with `grep -n` in order to find the line numbers of what "
    "you are looking for.</NOTE>"
)
_LISTING_CLIPPED_NOTICE = (
    "<response clipped><NOTE>Due to the max output limit, only part of this directory has been shown to you. "
    "You should use `ls -la` instead to view large directories incrementally.</NOTE>"
)


class FileEditor:
    """Edits files.

    Args:
        workspace: Absolute path of the workspace, for the hint when a path is relative.
        files: Keeps earlier versions; None to keep them in the editor.
        seen: The contents that the model has seen; None to record them in the editor.
        max_output_chars: Bound of the numbered lines, or of the directory list, in one result.
    """

    def __init__(
        self,
        workspace: str,
        files: VersionedFiles | None = None,
        seen: SeenFiles | None = None,
        *,
        max_output_chars: int = 16000,
    ) -> None:
        assert os.path.isabs(workspace), workspace
        self._workspace = workspace
        self._files = files or VersionedFiles()
        self._seen = seen or SeenFiles()
        self._max_output_chars = max_output_chars
        self._commands = {
            "view": self._view,
            "create": self._create,
            "str_replace": self._str_replace,
            "insert": self._insert,
            "undo_edit": self._undo_edit,
            **dict.fromkeys(CELL_COMMANDS, self._change_cell),
        }

    def run(self, arguments: dict[str, object]) -> dict[str, object]:
        r"""Run one command.

        Idempotent: `view` only. Repeating an edit either fails or edits again.

        Args:
            arguments: `command` (view, create, str_replace, insert, undo_edit) and `path` (absolute); `file_text` for
                create, and `overwrite` to allow an existing file; `old_str` and `new_str` (empty if omitted) for
                str_replace, or `edits`, a list of both, and `replace_all`; `insert_line` (an integer or
                its decimal digits; 0 is before the first line) and `new_str` for insert; `view_range` ([first, last],
                counted from 1, -1 is the last line) for view. Other keys are ignored.

        Returns:
            `content` (the text for the model), `is_error`, `path`, `prev_exist` (whether the path existed before); and
            after an edit `old_content` (None after create), `new_content` and `diff` (unified; "" if nothing changed),
            in which every line break is `\n`. These three are None after `view` and after an error.
        """
        path = str(arguments.get("path") or "")
        try:
            command = optional_text(arguments, "command")
            if command not in self._commands:
                raise EditRefusedError(
                    f"Unrecognized command {excerpt(str(command))}. The allowed commands for the str_replace_editor "
                    f"tool are: {', '.join(self._commands)}"
                )
            overwrites = arguments.get("overwrite") is True
            path = self._check_path(command, require_text(arguments, "path", command), overwrites=overwrites)
            return self._commands[command](path, arguments)
        except EditorError as error:
            exists = path.startswith("/") and os.path.exists(path)
            return _result(f"ERROR:\n{error}", path, is_error=True, prev_exist=exists)

    def _check_path(self, command: str, path: str, *, overwrites: bool) -> str:
        if not path.startswith("/"):
            hint = "The path should be an absolute path, starting with `/`."
            suggestion = os.path.join(self._workspace, path)
            if path and os.path.exists(suggestion):
                hint += f" Maybe you meant {suggestion}?"
            raise InvalidParameterError("path", path, hint)
        path = path.rstrip("/") or "/"
        status = find_status(path)
        if command == "create" and status and not overwrites:
            raise InvalidParameterError(
                "path",
                path,
                f"File already exists at: {path}. Cannot overwrite files using command `create`. "
                "Set `overwrite` to true to replace its whole content.",
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
            # Differs: documents are not converted to Markdown, because the workspace host has only the standard
            # library.
            raise EditRefusedError(
                f"Error in converting file to Markdown: the workspace has no converter. Please use Python code to read "
                f"{path}"
            )
        if is_picture(path):
            return {**_result(f"The picture {path} is shown.", path), "image_url": picture_url(path)}
        content, file = self._files.read(path)
        self._seen.note(path, content)
        if path.endswith(NOTEBOOK_ENDING):
            notebook = _notebook(file.text, path)
            if notebook is not None:
                return _result(notebook.render(view_range, self._max_output_chars), path)
        lines = _split_lines(file.text)
        first, last, note = (1, len(lines), "") if view_range is None else parse_line_range(view_range, len(lines))
        return _result(note + self._number(lines, first, last, path), path)

    def _create(self, path: str, arguments: dict[str, object]) -> dict[str, object]:
        text = require_text(arguments, "file_text", "create")
        if os.path.exists(path):
            return self._overwrite(path, with_plain_breaks(text))
        make_parents(path)
        self._files.create(path, text)
        self._seen.note(path, text.encode())
        return _result(
            f"File created successfully at: {path}", path, prev_exist=False, new_content=with_plain_breaks(text)
        )

    def _overwrite(self, path: str, text: str) -> dict[str, object]:
        content, file = self._files.read(path)
        self._seen.require_current(path, content)
        self._files.change(path, content, file, text)
        self._seen.note(path, self._files.read(path)[0])
        return _result(f"File overwritten at: {path}", path, old_content=file.text, new_content=text)

    def _str_replace(self, path: str, arguments: dict[str, object]) -> dict[str, object]:
        is_everywhere = arguments.get("replace_all") is True
        if arguments.get("edits") is not None:
            replacements = parse_replacements(arguments["edits"], is_everywhere=is_everywhere)
        else:
            old_str = require_text(arguments, "old_str", "str_replace")
            new_str = optional_text(arguments, "new_str") or ""
            replacements = [Replacement(old_str, new_str, is_everywhere=is_everywhere)]
        content, file = self._files.read(path)
        self._seen.require_current(path, content)
        text, spans = apply_replacements(file.text, replacements, path)
        self._change(path, content, file, text)
        snippets = self._snippets(text, spans, path)
        count = f" ({len(spans)} replacements)" if len(spans) > 1 else ""
        return _result(
            f"The file {path} has been edited{count}. {snippets}"
            "Review the changes and make sure they are as expected. Edit the file again if necessary.",
            path,
            old_content=file.text,
            new_content=text,
        )

    def _change(self, path: str, content: bytes, file: TextFile, text: str) -> None:
        self._files.change(path, content, file, text)
        self._seen.note_change(path, self._files.read(path)[0])

    def _insert(self, path: str, arguments: dict[str, object]) -> dict[str, object]:
        content, file = self._files.read(path)
        self._seen.require_current(path, content)
        line_number = parse_insert_line(arguments, len(_split_lines(file.text)) if file.text else 0)
        new_str = with_plain_breaks(require_text(arguments, "new_str", "insert"))
        # Differs: if the last line has no line break, it gets one before the inserted line, so that the two stay
        # separate.
        lines = file.text.split("\n", line_number)
        lines.insert(line_number, new_str)
        text = "\n".join(lines)
        self._change(path, content, file, text)
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

    def _change_cell(self, path: str, arguments: dict[str, object]) -> dict[str, object]:
        from tool_worker.host.editor.notebook import JupyterNotebook  # imports the whole of `json`

        content, file = self._files.read(path)
        self._seen.require_current(path, content)
        text, cell = JupyterNotebook(file.text, path).change(str(arguments["command"]), arguments)
        self._change(path, content, file, text)
        shown = JupyterNotebook(text, path).render([cell, cell] if cell else None, self._max_output_chars)
        return _result(f"The notebook has been edited. {shown}", path, old_content=file.text, new_content=text)

    def _undo_edit(self, path: str, _arguments: dict[str, object]) -> dict[str, object]:
        file, earlier = self._files.restore(path)
        self._seen.note_change(path, self._files.read(path)[0])
        lines = _split_lines(earlier.text)
        return _result(
            f"Last edit to {path} undone successfully. {self._number(lines, 1, len(lines), path)}",
            path,
            old_content=file.text,
            new_content=earlier.text,
        )

    def _snippets(self, text: str, spans: list[Span], path: str) -> str:
        """Number the lines around each span; nearby spans share one snippet."""
        places: list[list[int]] = []
        position = 0
        line = 0
        for start, end in spans[:SPANS_LIMIT]:
            line += text.count("\n", position, start)
            position, first = start, line + 1
            last = first + text.count("\n", start, end)
            if places and first <= places[-1][1] + 2 * SNIPPET_CONTEXT_LINES:
                places[-1][1] = max(places[-1][1], last)
            elif len(places) < SNIPPETS_LIMIT:
                places.append([first, last])
        return "".join(self._number_around(text, first, last, f"a snippet of {path}") for first, last in places)

    def _number_around(self, text: str, first: int, last: int, description: str) -> str:
        lines = _split_lines(text)
        first = max(1, first - SNIPPET_CONTEXT_LINES)
        last = min(len(lines), last + SNIPPET_CONTEXT_LINES)
        return self._number(lines, first, last, description)

    def _number(self, lines: list[str], first: int, last: int, description: str) -> str:
        numbered = []
        length = -1  # the last line is joined without a break
        for number in range(first, last + 1):
            # Differs: the limit includes the line numbers, because of files with many short lines. Lines are cut before
            # they are joined, because one line may be a thousand times longer than the limit.
            numbered.append(f"{number:6}\t{lines[number - 1][: self._max_output_chars]}")
            length += len(numbered[-1]) + 1
            if length > self._max_output_chars:
                break
        body = "\n".join(numbered)
        if len(body) > self._max_output_chars:
            body = body[: self._max_output_chars] + _CLIPPED_NOTICE
        return f"Here's the result of running `cat -n` on {description}:\n{body}\n"


def _notebook(text: str, path: str) -> JupyterNotebook | None:
    """Return the notebook in a text; None if the text is not a notebook and must be shown as it is."""
    from tool_worker.host.editor.notebook import JupyterNotebook

    try:
        return JupyterNotebook(text, path)
    except EditRefusedError:
        return None


def _split_lines(text: str) -> list[str]:
    """Return the lines of a text without their breaks; an empty text is one empty line."""
    # Differs: a final line break does not start another empty line, because models would try to edit that line.
    lines = text.split("\n")
    if len(lines) > 1 and not lines[-1]:
        lines.pop()
    return lines


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
        "diff": None if new_content is None else render_unified_diff(old_content or "", new_content, path),
    }


def list_directory(path: str, limit_chars: int) -> str:
    """List a directory and its subdirectories, each followed by its entries in the order of their names.

    Symbolic links are followed. A subdirectory that cannot be read is shown without its entries.

    Args:
        path: Absolute path of the directory.
        limit_chars: Bound of the list itself, without header and notices.

    Raises:
        FileAccessError: the directory itself cannot be read.
    """
    root = path.rstrip("/") + "/"
    try:
        names, hidden_count = _read_names(root, limit_chars)
    except OSError as error:
        raise FileAccessError(error, f"list {path}") from error
    # Differs: each directory is followed by its own entries, because the order of `sort` depends on the locale.
    listing = root
    for name in names:
        listing += _list_entry(root + name, limit_chars)
        if len(listing) > limit_chars:
            listing = listing[:limit_chars] + _LISTING_CLIPPED_NOTICE
            break
    text = f"Here's the files and directories up to 2 levels deep in {path}, excluding hidden items:\n{listing}"
    if hidden_count:
        text += (
            f"\n\n{hidden_count} hidden files/directories in this directory are excluded. "
            f"You can use 'ls -la {path}' to see them."
        )
    return text


def _list_entry(path: str, limit_chars: int) -> str:
    """Return the path of an entry on one line and, for a directory, the paths in it on the next lines."""
    if not os.path.isdir(path):
        return f"\n{path}"
    directory = path + "/"
    try:
        names, _ = _read_names(directory, limit_chars)
    except OSError:
        names = []
    lines = [directory]
    for name in names:
        entry = directory + name
        lines.append(entry + "/" if os.path.isdir(entry) else entry)
    return "".join("\n" + line for line in lines)


def _read_names(directory: str, limit: int) -> tuple[list[str], int]:
    """Return the sorted names of at most `limit` visible entries, and the number of hidden ones found so far."""
    names = []
    hidden_count = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                hidden_count += 1
                continue
            names.append(entry.name)
            # A name takes at least two characters with its line break, so more names could not be shown.
            if len(names) >= limit:
                break
    return sorted(names), hidden_count
