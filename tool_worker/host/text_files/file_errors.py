"""Why the file editor did not do what it was asked to.

    EditorError                   code, retryable
    ├── MissingParameterError     a parameter that the command needs was not given
    ├── InvalidParameterError     a parameter was given that cannot be used
    ├── FileRejectedError         the file is too large, or no regular file
    │   └── NoTextError           the file is binary
    ├── FileAccessError           the operating system refused: permissions, space, names, ...
    └── EditRefusedError          the file is fine, the edit is not: no unique match, no history, ...

The texts are read by a model, so each says what to do next. Wording that models know from OpenHands (openhands-aci) is
kept letter by letter.

Holds: every text is bounded, however long the arguments are that it quotes.
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
    r"""Write what UTF-8 cannot hold, such as a byte of a file name that is not text, as `\udc80`."""
    return text.encode("utf-8", "backslashreplace").decode()


class EditorError(Exception):
    """The editor refused a call; nothing was written.

    Attributes:
        code: stable, machine-readable, lower_snake_case.
        retryable: whether the same call may succeed later without anybody changing anything.
    """

    code = "editor"
    retryable = False


class MissingParameterError(EditorError):
    """A parameter that the command needs was not given."""

    code = "missing_parameter"

    def __init__(self, command: str, parameter: str) -> None:
        super().__init__(f"Parameter `{parameter}` is required for command: {command}.")


class InvalidParameterError(EditorError):
    """A parameter was given that cannot be used."""

    code = "invalid_parameter"

    def __init__(self, parameter: str, value: object, hint: str) -> None:
        super().__init__(f"Invalid `{parameter}` parameter: {excerpt(str(value))}. {hint}")


class FileRejectedError(EditorError):
    """The file is of a kind or a size that the editor does not read."""

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
        error: What the operating system said.
        attempt: What was tried, as in "while trying to <attempt>".
    """

    code = "file_access"

    def __init__(self, error: OSError, attempt: str) -> None:
        remedy = _REMEDIES.get(error.errno or 0, "Look at it with bash.")
        super().__init__(f"Ran into {error.strerror or error} while trying to {excerpt(attempt)}. {remedy}")


class EditRefusedError(EditorError):
    """The file can be edited, but not in the way that was asked for."""

    code = "edit_refused"
