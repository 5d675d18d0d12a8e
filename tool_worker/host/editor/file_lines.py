r"""Reads and writes files or ranges of their lines, for the events of OpenHands 10.4 that name no editor.

A range is [start, end): lines are counted from 0, and an `end` of -1 is the end of the file. Numbers beyond the end
mean the end; an empty range is the position before `start`. Line breaks are shown as `\n`.

Holds: encoding, line breaks and mode of an existing file are kept; a failed call leaves the file unchanged.
Does not: confine paths to the workspace; the sandbox around the workspace host does this for all tools.
Differs: written text ends with exactly one line break, and an empty text is no line. Negative numbers and an end before
the start are refused, because Python's slices would write lines twice.
"""

from __future__ import annotations

import os
import stat

from tool_worker.host.editor.editor_arguments import require_text
from tool_worker.host.text_files.file_errors import (
    EditorError,
    EditRefusedError,
    FileAccessError,
    FileRejectedError,
    InvalidParameterError,
    NoTextError,
    as_utf8,
    excerpt,
)
from tool_worker.host.text_files.regular_file import find_status, is_picture, picture_url
from tool_worker.host.text_files.text_file import split_lines, with_plain_breaks
from tool_worker.host.text_files.versioned_files import VersionedFiles

MAX_READ_CHARS = 1_000_000
"""A longer text would be cut in its middle before it reaches the log."""


class FileLines:
    """Reads and writes lines of files.

    Args:
        files: Keeps the replaced versions.
        max_read_chars: Bound of the text that one call reads.
    """

    def __init__(self, files: VersionedFiles, *, max_read_chars: int = MAX_READ_CHARS) -> None:
        self._files = files
        self._max_read_chars = max_read_chars

    def read(self, arguments: dict[str, object]) -> dict[str, object]:
        """Read a range of lines.

        Args:
            arguments: `path` (relative to `cwd`), `start`, `end`, `cwd`.

        Returns:
            `content` (the lines or the error), `is_error`, `path` (absolute), and `image_url` for a picture.
        """
        path = ""
        try:
            path = _resolve_path(arguments, "read")
            if not _exists(path, "You can only read files."):
                cwd = excerpt(str(arguments.get("cwd")))
                raise EditRefusedError(f"File not found: {path}. Your current working directory is {cwd}.")
            if is_picture(path):
                return {**_result(f"The picture {path} is shown.", path), "image_url": picture_url(path)}
            return _result(self._read_text(path, arguments), path)
        except NoTextError:
            return _refusal(f"ERROR_BINARY_FILE: {path} holds no text. Use bash to look into it.", path)
        except EditorError as error:
            return _refusal(str(error), path)

    def write(self, arguments: dict[str, object]) -> dict[str, object]:
        """Replace a range of lines; a missing file is created together with its directories.

        Idempotent: only for a whole file.

        Args:
            arguments: `path` (relative to `cwd`), `content`, `start`, `end`, `cwd`.

        Returns:
            `content` (empty, or the error), `is_error`, `path` (absolute).
        """
        path = ""
        try:
            path = _resolve_path(arguments, "write")
            content = require_text(arguments, "content", "write")
            if _exists(path, "You can only write to files."):
                self._replace(path, with_plain_breaks(content), arguments)
            else:
                _range(arguments, 0)
                _make_directory_of(path)
                self._files.create(path, _end_with_break(content))
            return _result("", path)
        except NoTextError:
            return _refusal(
                f"File could not be decoded as text: {path}. If all of it is to be replaced, remove it first.", path
            )
        except EditorError as error:
            return _refusal(str(error), path)

    def _read_text(self, path: str, arguments: dict[str, object]) -> str:
        _, file = self._files.read(path)
        lines = split_lines(file.text)
        start, end = _range(arguments, len(lines))
        text = "".join(lines[start:end])
        if len(text) > self._max_read_chars:
            raise FileRejectedError(
                path,
                f"These {end - start} lines are {len(text)} characters long, and at most {self._max_read_chars} are "
                "read at once. Read fewer lines, with `start` and `end`.",
            )
        return text

    def _replace(self, path: str, text: str, arguments: dict[str, object]) -> None:
        old_content, file = self._files.read(path)
        lines = split_lines(file.text)
        start, end = _range(arguments, len(lines))
        # Differs: if the last line has no line break, it gets one before the added lines, so that they stay separate.
        edited = _end_with_break("".join(lines[:start])) + _end_with_break(text) + "".join(lines[end:])
        self._files.change(path, old_content, file, edited)


def _resolve_path(arguments: dict[str, object], command: str) -> str:
    path = require_text(arguments, "path", command)
    if not path:
        raise InvalidParameterError("path", path, "It should be the path of a file.")
    return os.path.join(str(arguments.get("cwd") or "/"), path)


def _exists(path: str, advice: str) -> bool:
    status = find_status(path)
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise EditRefusedError(f"Path is a directory: {path}. {advice}")
    return status is not None


def _range(arguments: dict[str, object], line_count: int) -> tuple[int, int]:
    """Return the requested range, limited to the lines of the file."""
    start, end = arguments.get("start", 0), arguments.get("end", -1)
    for name, number, least in (("start", start, 0), ("end", end, -1)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise InvalidParameterError(name, number, f"It should be an integer from {least} on.")
    assert isinstance(start, int)
    assert isinstance(end, int)
    if -1 != end < start:
        raise InvalidParameterError("end", end, f"It should be -1, or at least `start`, which is {start}.")
    return min(start, line_count), line_count if end == -1 else min(end, line_count)


def _make_directory_of(path: str) -> None:
    try:
        os.makedirs(os.path.dirname(os.path.realpath(path)), exist_ok=True)
    except OSError as error:
        raise FileAccessError(error, f"write to {path}") from error


def _end_with_break(text: str) -> str:
    """Return a text whose last line ends with a line break, of the same kind as its other lines."""
    if not text or text.endswith(("\n", "\r")):
        return text
    return text + ("\r\n" if text.count("\r\n") == text.count("\n") > 0 else "\n")


def _result(content: str, path: str) -> dict[str, object]:
    return {"content": content, "is_error": False, "path": excerpt(as_utf8(path))}


def _refusal(content: str, path: str) -> dict[str, object]:
    return {"content": as_utf8(content), "is_error": True, "path": excerpt(as_utf8(path))}
