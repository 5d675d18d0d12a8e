"""Replacements in a text, one after another: finds the occurrences, and the positions of the new text in the result."""

from __future__ import annotations

from bisect import bisect_left

from tool_worker.host.text_files.file_errors import EditRefusedError, InvalidParameterError, excerpt
from tool_worker.host.text_files.text_file import with_plain_breaks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

REPORTED_LINES_LIMIT = 100
EDITS_LIMIT = 200
SPANS_LIMIT = 100
"""Positions per edit; further replacements are not shown."""
TEXT_LIMIT_CHARS = 16 * 2**20

Span = tuple[int, int]
"""Start and end of a new text."""


class Replacement:
    """A text and its replacement; `is_everywhere`: replace every occurrence instead of requiring exactly one."""

    def __init__(self, old: str, new: str, *, is_everywhere: bool) -> None:
        self.old = with_plain_breaks(old)
        self.new = with_plain_breaks(new)
        self.is_everywhere = is_everywhere


def parse_replacements(edits: object, *, is_everywhere: bool) -> list[Replacement]:
    """Parse a list of edits.

    Raises:
        InvalidParameterError: the list is not valid.
    """
    hint = f"It should be a list of 1 to {EDITS_LIMIT} objects with the texts `old_str` and `new_str`."
    if not isinstance(edits, list) or not 0 < len(edits) <= EDITS_LIMIT:
        raise InvalidParameterError("edits", edits, hint)
    found = []
    for edit in edits:
        if not isinstance(edit, dict):
            raise InvalidParameterError("edits", edit, hint)
        old, new = edit.get("old_str"), edit.get("new_str", "")
        if not (isinstance(old, str) and isinstance(new, str) and _fits_a_file(old + new)):
            raise InvalidParameterError("edits", edit, hint)
        found.append(Replacement(old, new, is_everywhere=is_everywhere or edit.get("replace_all") is True))
    return found


def apply_replacements(text: str, replacements: list[Replacement], path: str) -> tuple[str, list[Span]]:
    """Apply replacements in order, each to the result of the previous ones.

    Returns:
        The new text, and the positions of the new pieces in it.

    Raises:
        InvalidParameterError: a replacement changes nothing.
        EditRefusedError: the text of a replacement is missing or not unique.
    """
    spans: list[Span] = []
    for number, one in enumerate(replacements, 1):
        try:
            text, spans = _apply_replacement(text, one, path, spans)
        except EditRefusedError as error:
            where = f" (edit {number} of {len(replacements)}; none was made)" if len(replacements) > 1 else ""
            raise EditRefusedError(f"{error}{where}") from None
    return text, sorted(spans)


def _apply_replacement(text: str, one: Replacement, path: str, spans: list[Span]) -> tuple[str, list[Span]]:
    old, new = _without_lacking_margins(text, one.old, one.new)
    if old == new:
        raise InvalidParameterError(
            "new_str", new, "No replacement was performed. `new_str` and `old_str` must be different."
        )
    if one.is_everywhere and not old:
        raise EditRefusedError("No replacement was performed. `old_str` is empty.")
    if not one.is_everywhere or old not in text:
        position = _find_only(old, text, path)
        end = position + len(old)
        shift = len(new) - len(old)
        spans = [(a + shift, b + shift) if a >= end else (a, b) for a, b in spans]
        return text[:position] + new + text[end:], [*spans, (position, position + len(new))]
    size = len(text) + text.count(old) * (len(new) - len(old))
    if size > TEXT_LIMIT_CHARS:
        raise EditRefusedError(f"No replacement was performed. The file would have {size:,} characters.")
    pieces = text.split(old)
    position = 0
    found: list[Span] = []
    for piece in pieces[: min(len(pieces) - 1, SPANS_LIMIT)]:
        position += len(piece)
        found.append((position, position + len(new)))
        position += len(new)
    # The positions of earlier pieces are dropped: with this many new pieces, recomputing them is not worth it.
    return new.join(pieces), found


def _without_lacking_margins(text: str, old: str, new: str) -> tuple[str, str]:
    """Return both texts without the outer white space of `old` that is missing in the file.

    Differs: OpenHands strips both texts, which loses an indentation that only `new` has.
    """
    core = old.strip()
    if old in text or not core:
        return old, new
    count = text.count(core)
    if not count:
        return core, new
    start = old.index(core)
    end = start + len(core)
    first = bisect_left(range(start), True, key=lambda place: text.count(old[place:end]) == count)
    last = end + bisect_left(range(1, len(old) - end + 1), True, key=lambda n: text.count(old[first : end + n]) < count)
    # A blank line that the file lacks is left out as a whole: its last part is not an indentation.
    first += bool(first) and old[first] == "\n"
    if last < len(old):
        last = old.rfind("\n", end, last) + 1 or last
    new = _without_common_start(new, old[:first])
    return old[first:last], _without_common_end(new, old[last:], is_of_lines=old[last - 1] == "\n")


def _without_common_start(text: str, start: str) -> str:
    """Remove the common prefix of a text and `start` from the text; only whole lines if `start` consists of lines."""
    count = _count_common(text, start)
    return text[text.rfind("\n", 0, count) + 1 if start.endswith("\n") else count :]


def _without_common_end(text: str, end: str, *, is_of_lines: bool) -> str:
    """Remove the common suffix of a text and `end` from the text; only whole lines if `end` consists of lines."""
    kept = len(text) - _count_common(reversed(text), reversed(end))
    if is_of_lines and kept and text[kept - 1] != "\n":
        kept = text.find("\n", kept) + 1 or len(text)
    return text[:kept]


def _count_common(characters: Iterable[str], others: Iterable[str]) -> int:
    """Return how many characters are the same until the first difference."""
    count = 0
    for one, other in zip(characters, others):  # noqa: B905  (the shorter one ends the comparison)
        if one != other:
            break
        count += 1
    return count


def _find_only(old_str: str, text: str, path: str) -> int:
    """Return the position of the only occurrence of `old_str`."""
    position = text.find(old_str)
    if position < 0:
        raise EditRefusedError(
            f"No replacement was performed, old_str `{excerpt(old_str)}` did not appear verbatim in {path}."
        )
    # Differs: overlapping occurrences count, because the target is ambiguous with them as well.
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


def _fits_a_file(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
