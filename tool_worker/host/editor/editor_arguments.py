"""Validates the arguments of the file editor; a model may send any JSON.

Holds: a valid text can be written to a file and sent on as UTF-8.
"""

from __future__ import annotations

from tool_worker.host.text_files.file_errors import (
    EditRefusedError,
    InvalidParameterError,
    MissingParameterError,
    excerpt,
)


def optional_text(arguments: dict[str, object], name: str) -> str | None:
    """Return a text argument; None if it is missing.

    Raises:
        InvalidParameterError: it is not a string, or contains a NUL or a lone surrogate.
    """
    value = arguments.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidParameterError(name, value, "It should be a string.")
    if "\0" in value:
        raise InvalidParameterError(
            name, value, "It holds a NUL character, which a text file cannot. Use bash to write binary files."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        surrogate = ord(value[error.start])
        raise InvalidParameterError(
            name, value, f"It holds the lone surrogate U+{surrogate:04X}, which no file can. Send the whole character."
        ) from None
    return value


def require_text(arguments: dict[str, object], name: str, command: str) -> str:
    """Return a text argument that the command needs.

    Raises:
        MissingParameterError: it is missing.
        InvalidParameterError: as for `optional_text`.
    """
    value = optional_text(arguments, name)
    if value is None:
        raise MissingParameterError(command, name)
    return value


def parse_insert_line(arguments: dict[str, object], line_count: int) -> int:
    """Return the number of the line after which to insert; 0 is before the first line.

    Raises:
        MissingParameterError: it is missing.
        EditRefusedError: it is neither an integer nor the decimal digits of one.
        InvalidParameterError: the file has fewer lines.
    """
    value = arguments.get("insert_line")
    if value is None:
        raise MissingParameterError("insert", "insert_line")
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if not isinstance(number, int) or isinstance(number, bool):
        raise EditRefusedError(f"Invalid insert_line value: '{excerpt(str(value))}'. Expected an integer.")
    if not 0 <= number <= line_count:
        raise InvalidParameterError(
            "insert_line", number, f"It should be within the range of allowed values: {[0, line_count]}"
        )
    return number


def parse_line_range(view_range: object, line_count: int) -> tuple[int, int, str]:
    """Parse the range of lines to view.

    Args:
        view_range: [first, last], counted from 1; a `last` of -1 is the last line of the file.
        line_count: Number of lines of the file, at least 1.

    Returns:
        First and last line, both within the file, and a note to show before them, which may be empty.

    Raises:
        InvalidParameterError: the range is not valid for this file.
    """
    if not (isinstance(view_range, list) and len(view_range) == 2 and all(map(_is_integer, view_range))):
        raise InvalidParameterError("view_range", view_range, "It should be a list of two integers.")
    first, last = view_range
    if not 1 <= first <= line_count:
        raise InvalidParameterError(
            "view_range",
            view_range,
            f"Its first element `{first}` should be within the range of lines of the file: {[1, line_count]}.",
        )
    note = ""
    if last == -1:
        last = line_count
    elif last > line_count:
        last = line_count
        note = f"NOTE: We only show up to {last} since there're only {last} lines in this file.\n"
    if last < first:
        raise InvalidParameterError(
            "view_range",
            view_range,
            f"Its second element `{last}` should be greater than or equal to the first element `{first}`.",
        )
    return first, last, note


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
