"""The errors of the file editor.

    EditorError code, retryable ├── MissingParameterError a required parameter is missing ├── InvalidParameterError a
    parameter has an invalid value ├── FileRejectedError the file is too large, or not a regular file │ └── NoTextError
    the file is binary ├── FileAccessError the operating system refused: permissions, space, names, ... └──
    EditRefusedError the file is usable, the edit is not: no unique match, no history, ...

A model reads the texts, so each names the next step. Wording that models know from OpenHands (openhands-aci) is kept
verbatim.

Holds: every text is bounded, however long the quoted arguments are.
Does not: depend on `broker.runtime.errors`; the workspace host starts from the standard library alone.
"""

from __future__ import annotations

import errno

QUOTED_CHARS_LIMIT = 4096

_REMEDIES = {
    errno.EACCES: "Check the permissions with `ls -la`.",
    errno.EPERM: "Check the permissions with `ls -la`.",
    errno.EROFS: "Choose a path on a file system that can be written.",
    errno.ENOSPC: "Free some space first; `df -h` shows what is full.",
    errno.EDQUOT: "Free some space first; `df -h` shows what is full.",
    errno.ENAMETOOLONG: "Use a shorter path.",
    errno.ENOENT: "If its directory is missing, create it first, e.g. with `mkdir -p`.",
    errno.ENOTDIR: "A part of the path is a file and not a directory: choose another path.",
    errno.ELOOP: "Its symbolic links lead in a circle: check them with `ls -la`.",
}


def excerpt(text: str, limit: int = QUOTED_CHARS_LIMIT) -> str:
    """Shorten a text to about `limit` characters by leaving out its middle."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}... [{len(text) - 2 * half} characters left out] ...{text[-half:]}"


def as_utf8(text: str) -> str:
    r"""Escape characters that UTF-8 cannot encode, such as an undecodable byte of a file name, as `\udc80`."""
    return text.encode("utf-8", "backslashreplace").decode()


class EditorError(Exception):
    """The editor refused a call; nothing was written.

    Attributes:
        code: Stable, machine-readable, lower_snake_case.
        retryable: Whether the same call may succeed later without any change.
    """

    code = "editor"
    retryable = False


class MissingParameterError(EditorError):
    """A required parameter is missing."""

    code = "missing_parameter"

    def __init__(self, command: str, parameter: str) -> None:
        super().__init__(f"Parameter `{parameter}` is required for command: {command}.")


class InvalidParameterError(EditorError):
    """A parameter has an invalid value."""

    code = "invalid_parameter"

    def __init__(self, parameter: str, value: object, hint: str) -> None:
        super().__init__(f"Invalid `{parameter}` parameter: {excerpt(str(value))}. {hint}")


class FileRejectedError(EditorError):
    """The file has a type or a size that the editor does not read."""

    code = "file_rejected"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"File validation failed for {path}: {reason}")


class NoTextError(FileRejectedError):
    """The file is binary."""

    code = "no_text"

    def __init__(self, path: str) -> None:
        super().__init__(path, "File appears to be binary and this file type cannot be read or edited by this tool.")


class FileAccessError(EditorError):
    """The operating system refused to read or write the file.

    Args:
        error: The error of the operating system.
        attempt: The attempted operation, as in "while trying to <attempt>".
    """

    code = "file_access"

    def __init__(self, error: OSError, attempt: str) -> None:
        remedy = _REMEDIES.get(error.errno or 0, "Look at it with bash.")
        super().__init__(f"Ran into {error.strerror or error} while trying to {excerpt(attempt)}. {remedy}")


class EditRefusedError(EditorError):
    """The file can be edited, but not with this edit."""

    code = "edit_refused"
