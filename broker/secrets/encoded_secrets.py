r"""Secrets written byte by byte or character by character: in dumps, with separators, as escapes.

There are too many such forms to search for each of them. Instead, a text is normalised in place: separators, line
numbers and repetitions are blanked, and an escape becomes its character and fillers, so no position changes. Then the
text is searched without its fillers, and matches are mapped back.

    digits      `xxd`, `xxd -p`, `od`, `hexdump`, arrays of bytes: offsets and the column of characters are blanked,
                separators left out. Also the characters themselves with separators between all of them, in any case.
    dumps       the same after a prefix on each line, such as an indentation, a number, a time or a name. Of each line,
                only its longest run of equal groups is kept.
    characters  `\x67`, `\u0067`, `\147`, `%67`, `&#103;` and similar escapes, of all characters or of some.

Holds: a text without matches costs a few passes in machine code. A match is no longer than `reach_bytes`.
Does not: find dumps in words of four or more bytes in native byte order, or secrets that were encoded twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

MINIMUM_BYTES = 8
BYTES_PER_BYTE = 12
"""The largest encoded size of one byte: a numeric entity, or its share of a dump line."""

LINE_BYTES = 256
"""The longest line of a dump."""

_SEPARATORS = b" \t\r\n:,-"
_FILLER = b"\0"
_END = b"."
"""Neither a digit nor a separator."""

_COLUMN = re.compile(rb"  |[|>]")
"""The separator between the digits of a line and its characters."""
_OFFSET = re.compile(rb"\n[0-9a-f]{6,16}(?= )")
_DUMP_LINE = re.compile(
    rb"\n(?:[0-9a-f]{4,16}:(?P<xxd>(?: [0-9a-f]{2,16})+)(?:  [^\n]*)?"
    rb"|[0-9a-f]{6,16}(?P<od>(?: {1,2}[0-9a-f]{2})+)(?: *[|>][^\n]*)?)(?=\n|\Z)"
)


def _compile_run(
    group: bytes, *, gap: bytes = b" {1,3}", rest: bytes = b"", least: int = 3
) -> tuple[re.Pattern[bytes], ...]:
    """Return two patterns: one for the runs of groups in a line of a dump, and one that detects texts with such lines.

    Args:
        gap: the separator between two groups.
        rest: a shorter group at the end.
        least: the fewest groups of a full line.
    """
    begins, ends = rb"(?<![0-9a-z:.-])", rb"(?![0-9a-z:])"
    tail = rb"(?:%s%s)?" % (gap, rest) if rest else b""
    run = rb"%s(?:%s(?:%s%s)*%s%s)%s" % (begins, group, gap, group, tail, b"|" + rest if rest else b"", ends)
    line = rb"%s%s(?:%s%s){%d}" % (begins, group, gap, group, least - 1)
    return re.compile(run), re.compile(line)


_RUNS = (
    _compile_run(rb"[0-9a-f]{2}", gap=b"[ ,]{1,5}"),
    (
        re.compile(rb"(?<![0-9a-z:.-])(?:[0-9a-f]{2})+(?![0-9a-z:])"),
        re.compile(rb"(?<![0-9a-z:.-])(?:[0-9a-f]{2}){6,}(?![0-9a-z:])"),
    ),
    _compile_run(rb"[0-9a-f]{4}", gap=b" {1,4}", rest=rb"[0-9a-f]{2}"),
    _compile_run(rb"[0-9a-f]{8}", rest=rb"(?:[0-9a-f]{2}){1,3}", least=2),
    _compile_run(rb"[0-9a-f]{16}", rest=rb"(?:[0-9a-f]{2}){1,7}", least=2),
    _compile_run(rb"[0-3][0-7]{2}"),
    _compile_run(rb"[0-7]{6}", gap=b" {1,2}"),
    _compile_run(rb"[0-9]{1,3}", gap=b" {1,5}"),
    (
        re.compile(rb"(?: {3}[!-~]| {2}\\[0abfnrtv]| [0-7]{3}| {4})+(?!\S)"),
        re.compile(rb"(?: {3}[!-~]| {2}\\[0abfnrtv]| [0-7]{3}| {4}){8}"),
    ),
)
"""Bytes and words of `xxd`, `hexdump` and `od` in three bases, and the characters of `od -c`."""
_ESCAPES = {  # each pattern starts with its literal sign, so that the search is fast
    b"%": re.compile(rb"%(?:(?P<byte>[0-9a-fA-F]{2})|u(?P<unit>[0-9a-fA-F]{4}))"),
    b"\\": re.compile(
        rb"\\(?:x(?P<byte>[0-9a-fA-F]{2})|(?:u|U0000)(?P<unit>[0-9a-fA-F]{4})"
        rb"|[ux]\{(?P<point>[0-9a-fA-F]{1,8})\}|(?P<octal>[0-3][0-7]{2}))"
    ),
    b"&": re.compile(
        rb"&(?:#[xX](?P<point>[0-9a-fA-F]{1,8});|#(?P<decimal>[0-9]{1,8});|(?P<name>amp|lt|gt|quot|apos);)"
    ),
}
_NAMES = {b"amp": b"&", b"lt": b"<", b"gt": b">", b"quot": b'"', b"apos": b"'"}


class EncodedSecrets:
    """Finds values in these forms."""

    def __init__(self, values: Sequence[str]) -> None:
        raws = {value.encode("utf-8", "surrogatepass") for value in values}
        self._characters = [raw.lower() for raw in raws if len(raw) >= MINIMUM_BYTES]
        self._digits = sorted(
            {form for raw in raws for form in _find_digit_forms(raw) if len(form) >= 2 * MINIMUM_BYTES}
        )
        self._spaced = [each for raw in raws for each in _find_spaced_forms(raw)]
        self.reach_bytes = BYTES_PER_BYTE * max(map(len, raws), default=0) + LINE_BYTES

    def find_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the positions of matches in a text, in any order."""
        raw = text.encode("utf-8", "surrogatepass")
        found = [*self._find_in_digits(raw.lower()), *self._find_in_characters(raw)]
        near = [span for span in found if span[1] - span[0] <= self.reach_bytes]
        return near if text.isascii() else _to_character_spans(raw, near)

    def _find_in_digits(self, raw: bytes) -> Iterator[tuple[int, int]]:
        plain = raw.replace(b"0x", b"  ").replace(b"\\x", b"  ")
        begun = b"\n" + plain
        without_columns = _OFFSET.sub(_blank, _DUMP_LINE.sub(_keep_digits, begun))
        dump = without_columns[1:]
        whole = set[int]()  # the starts of matches without separators between their digits
        views = [plain] if dump == plain else [plain, dump]
        views += [_keep_runs(plain, run) for run, line in _RUNS if line.search(plain)]
        for view in views:
            squeezed = view.translate(None, _SEPARATORS)
            places = _KeptPositions(view, _SEPARATORS)
            for form in self._digits:
                for at in _find_all(squeezed, form):
                    begin, end = places.kept[at], places.kept[at + len(form) - 1] + 1
                    if view is plain:
                        whole.add(begin)
                    elif view is not dump and begin in whole:
                        continue  # the rest of its line is not a column of a dump
                    line_end = end if view is plain else _find_line_end(raw, end)
                    yield begin, line_end if view is dump or _COLUMN.search(raw, end, line_end) else end
            for spaced in self._spaced:
                for at in _find_all(squeezed, spaced.form):
                    kept = places.kept[at : at + len(spaced.form)]
                    if view[kept[0] : kept[-1] + 1] == spaced.value or _count_gaps(kept) >= spaced.gaps:
                        yield kept[0], kept[-1] + 1

    def _find_in_characters(self, raw: bytes) -> Iterator[tuple[int, int]]:
        view = raw
        for sign, escape in _ESCAPES.items():
            view = escape.sub(_unescape, view) if sign in view else view
        if _FILLER not in view:
            return
        view = view.lower()
        squeezed = view.translate(None, _FILLER)
        places = _KeptPositions(view, _FILLER)
        for form in self._characters:
            for at in _find_all(squeezed, form):
                kept = places.kept
                behind = at + len(form)
                yield kept[at], kept[behind] if behind < len(kept) else len(view)


@dataclass(frozen=True, slots=True)
class _SpacedForm:
    """A value with separators between all of its characters.

    Values with separators between words only are not searched for.

    Attributes:
        form: the characters.
        value: the value in lower case, because it may also be present unseparated.
        gaps: the fewest separators of a match.
    """

    form: bytes
    value: bytes
    gaps: int


class _KeptPositions:
    """The positions of a squeezed view's bytes in the original, computed on first use."""

    def __init__(self, view: bytes, left_out: bytes) -> None:
        self._view = view
        self._left_out = frozenset(left_out)
        self._kept: list[int] | None = None

    @property
    def kept(self) -> list[int]:
        if self._kept is None:
            self._kept = [at for at, byte in enumerate(self._view) if byte not in self._left_out]
        return self._kept


def _find_line_end(raw: bytes, at: int) -> int:
    """Return the end of the line, to include the column of characters after the digits."""
    end = raw.find(b"\n", at, at + LINE_BYTES)
    return min(at + LINE_BYTES, len(raw)) if end < 0 else end


def _find_digit_forms(raw: bytes) -> set[bytes]:
    """Return a value as digits without separators: bytes in three bases, and two-byte words as printed by `od`."""
    words = [[(low, high) for low, high in zip(raw[first::2], raw[first + 1 :: 2], strict=False)] for first in (0, 1)]
    found = {raw.hex(), "".join(f"{byte:03o}" for byte in raw), "".join(map(str, raw))}
    found |= {"".join(f"{high:02x}{low:02x}" for low, high in each) for each in words}
    found |= {"".join(f"{high << 8 | low:06o}" for low, high in each) for each in words}
    return {form.encode() for form in found}


def _find_spaced_forms(raw: bytes) -> Iterator[_SpacedForm]:
    """Yield a value as its characters, and as printed by `od -c`."""
    cells = [byte for byte in raw if byte not in _SEPARATORS]
    characters = len(bytes(cells).decode("utf-8", "surrogatepass"))
    named = b"".join(bytes([byte]) if 0x20 <= byte < 0x7F else f"{byte:03o}".encode() for byte in cells)
    for form in {bytes(cells).lower(), named.lower()}:
        if len(form) >= MINIMUM_BYTES:
            yield _SpacedForm(form, raw.lower(), characters - 1)


def _count_gaps(kept: Sequence[int]) -> int:
    """Return the number of gaps between consecutive positions."""
    return sum(later > earlier + 1 for earlier, later in pairwise(kept))


def _keep_runs(raw: bytes, run: re.Pattern[bytes]) -> bytes:
    """Keep the longest run of each line (the last of equal ones) and blank everything else.

    A line without a run ends the dump, unless it is indented, like the second lines of `od -tx1c`.
    """
    lines = []
    for line in raw.split(b"\n"):
        begin = end = 0
        for found in run.finditer(line) if len(line) <= LINE_BYTES else ():
            if found.end() - found.start() >= end - begin:
                begin, end = found.span()
        blank = b" " * begin if end or line[:1].isspace() else _END[: len(line)]
        lines.append(blank + line[begin:end] + b" " * (len(line) - max(end, len(blank))))
    return b"\n".join(lines)


def _blank(found: re.Match[bytes]) -> bytes:
    return b"\n" + b" " * (len(found.group()) - 1)


def _keep_digits(found: re.Match[bytes]) -> bytes:
    group = found.lastgroup or ""
    begin, end = found.span(group)
    return b"\n" + b" " * (begin - found.start() - 1) + found.group(group) + b" " * (found.end() - end)


def _unescape(found: re.Match[bytes]) -> bytes:
    digits = found.group(found.lastgroup or 0)
    match found.lastgroup:
        case "byte":
            character = bytes([int(digits, 16)])
        case "octal":
            character = bytes([int(digits, 8)])
        case "name":
            character = _NAMES[digits]
        case kind:
            point = int(digits, 10 if kind == "decimal" else 16)
            character = chr(point).encode("utf-8", "surrogatepass") if point <= 0x10FFFF else digits
    return character + _FILLER * (len(found.group()) - len(character))


def _find_all(text: bytes, form: bytes) -> Iterator[int]:
    at = text.find(form)
    while at >= 0:
        yield at
        at = text.find(form, at + 1)


def _to_character_spans(raw: bytes, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Convert byte spans to character spans; a partly covered character is included."""
    counted = 0
    at = 0
    place_of = dict[int, int]()
    for place in sorted({place for span in spans for place in span}):
        end = place
        while end < len(raw) and raw[end] & 0xC0 == 0x80:  # in the middle of a character
            end += 1
        counted += len(raw[at:end].decode("utf-8", "surrogatepass"))
        at = end
        place_of[place] = counted
    return [(place_of[begin], place_of[end]) for begin, end in spans]
