"""Finds secrets in texts, in all forms that programs commonly print, and masks them.

Holds:
    - A value is found verbatim, reversed, in base64, URL-safe base64 and base32 (also inside a longer encoded text), in
      hexadecimal, URL-encoded, escaped for JSON, HTML or a shell, by its single lines, with line breaks inserted, and
      byte by byte or character by character, in dumps and as escapes: see `encoded_secrets`.
    - A text that arrives in pieces is masked like the whole text, wherever it was cut.
    - The remains of a value at the cut of a shortened text are found, too.
    - Binary content is skipped by the type of its field, never by its appearance.
Does not: find a secret that a program has transformed in any other way. Do not give a secret to a program that might
reveal it.
"""

from __future__ import annotations

import base64
import html
import json
import shlex
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

from broker.contract import TRUNCATION_MARKER
from broker.secrets.encoded_secrets import LINE_BYTES, EncodedSecrets

MASK = "<secret_hidden>"
MIN_SECRET_CHARS = 8
"""Shorter values would match everywhere."""

BINARY_FIELDS = frozenset({"screenshot", "set_of_marks"})
"""Event fields that hold an encoded image and nothing else."""
IMAGE_FIELDS = frozenset({"image_urls", "goal_image_urls"})
"""Fields that hold addresses of images, or images as `data:` addresses."""

CUT_MARKERS = (TRUNCATION_MARKER, "<response clipped>")
"""The markers for the left-out middle or rest of a long text."""
MIN_CUT_CHARS = 4
"""The fewest characters at a cut that are recognised as part of a value."""

_WRAPPED_FACTOR = 3
"""The largest growth of a value by line breaks: at most two characters after each character."""


def find_forms(value: str) -> set[str]:
    """Return all forms of a value to search for; none is shorter than `MIN_SECRET_CHARS`."""
    raw = value.encode("utf-8", "surrogatepass")
    found = {value, value.strip(), value[::-1], raw.hex(), raw.hex().upper()}
    found |= {repr(value)[1:-1], ascii(value)[1:-1], repr(raw)[2:-1], value.encode("unicode_escape").decode()}
    found |= _markup_forms(value) | _json_forms(value)
    found |= {inner for text in set(found) for inner in _json_forms(text)}
    found |= _shell_forms(value)
    found |= _url_forms(raw)
    found |= _base64_forms(raw) | _base32_forms(raw)
    if "\n" in value:
        found |= {line.strip() for line in value.splitlines() if not line.startswith("-----")}
        found.add(_join_lines(value.strip())[0])  # the form for the search across lines, with any line endings
    return {form for form in found if len(form) >= MIN_SECRET_CHARS and form not in MASK}


def _markup_forms(value: str) -> set[str]:
    """Return the forms in HTML, XML, YAML, SQL and CSV."""
    escaped = html.escape(value)  # quotation marks have several names
    found = {escaped, html.escape(value, quote=False), value.replace("'", "''"), value.replace('"', '""')}
    return (
        found
        | {escaped.replace("&#x27;", "&#39;").replace("&quot;", quotes) for quotes in ("&#34;", "&quot;")}
        | {escaped.replace("&#x27;", "&apos;")}
    )


def _json_forms(value: str) -> set[str]:
    """Return the forms in JSON as written by Python, JavaScript, Go (for web pages) and PHP."""
    plain = [json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]]
    web = [text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e") for text in plain]
    return {*plain, *web, *(text.replace("/", "\\/") for text in plain)}


def _shell_forms(value: str) -> set[str]:
    """Return the forms in a shell, quoted and unquoted."""
    in_double, bare = value, value
    for sign in '\\"$`':
        in_double = in_double.replace(sign, f"\\{sign}")
    for sign in "\\ '\"|&;()<>!{}*[]?^$`,":
        bare = bare.replace(sign, f"\\{sign}")
    return {shlex.quote(value)[1:-1], value.replace("'", "'\\''"), value.replace('"', '\\"'), in_double, bare}


def _url_forms(raw: bytes) -> set[str]:
    """Return the forms in URLs and web forms; languages differ in the characters that they escape."""
    found = {quote(raw, safe=safe) for safe in ("", "/", "!'()*", ";,/?:@&=+$!'()*#")}
    found |= {quote_plus(raw), quote_plus(raw, safe="*").replace("~", "%7E")}
    return found | {_lower_escapes(encoded) for encoded in found}


def _base64_forms(raw: bytes) -> set[str]:
    found = set()
    for offset in range(3):
        encoded = base64.b64encode(b"\0" * offset + raw).decode()
        # The first and the last encoded character also hold bits of the surrounding bytes, so they are left out.
        first = (0, 2, 3)[offset]
        last = len(encoded) - (0, 3, 2)[(offset + len(raw)) % 3]
        inner = encoded[first:last]
        found |= {inner, inner.replace("+", "-").replace("/", "_")}
    return found


def _base32_forms(raw: bytes) -> set[str]:
    """Return the forms in base32 at each of the five byte offsets, in upper and lower case."""
    found = set()
    for offset in range(5):
        encoded = base64.b32encode(b"\0" * offset + raw).decode()
        inner = encoded[-(-8 * offset // 5) : 8 * (offset + len(raw)) // 5]
        found |= {inner, inner.lower()}
    return found


def _lower_escapes(text: str) -> str:
    parts = text.split("%")
    return parts[0] + "".join(f"%{part[:2].lower()}{part[2:]}" for part in parts[1:])


class Masker:
    """Finds a set of secrets.

    Args:
        values: The secrets; values shorter than `MIN_SECRET_CHARS` are ignored.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        values = [value for value in values if len(value) >= MIN_SECRET_CHARS]
        self.values = frozenset(values)
        found = {form for value in values for form in find_forms(value)}
        self._encoded = EncodedSecrets([value.strip() for value in values])
        self._forms = sorted(found, key=len, reverse=True)
        self.longest_chars = max(map(len, self._forms), default=0)

    @property
    def reach_chars(self) -> int:
        """The longest possible match in characters."""
        return max(_WRAPPED_FACTOR * self.longest_chars, self._encoded.reach_bytes)

    def __bool__(self) -> bool:
        return bool(self._forms)

    def mask_text(self, text: str) -> str:
        """Return a text with its secrets masked."""
        return _mask_spans(text, self.find_spans(text))

    def mask_wire(self, value: Any) -> Any:
        """Return a copy of nested lists, dicts and texts with secrets masked, including names.

        The value itself is returned if there are no secrets.
        """
        return self._mask_value(value, "") if self._forms else value

    def find_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the positions of secrets in a text, in order and without overlap."""
        if not self._forms:
            return []
        found = self._find_forms(text) + self._encoded.find_spans(text)
        if "\n" in text:
            found += self._find_across_lines(text)
        for begin, end in find_cuts(text):
            found += self._find_at_cut(text, begin, end)
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(found):
            if merged and begin < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
        return merged

    def _find_forms(self, text: str) -> list[tuple[int, int]]:
        # Each search for one form runs in machine code; one expression of all forms would be slower.
        found = []
        for form in self._forms:
            at = text.find(form)
            while at >= 0:
                found.append((at, at + len(form)))
                at = text.find(form, at + 1)
        return found

    def _find_across_lines(self, text: str) -> list[tuple[int, int]]:
        """Find values with inserted line breaks, as in base64 and terminals; an empty line ends a match."""
        joined, places = _join_lines(text)
        starts = [start for start, _ in places]

        def original(position: int) -> int:
            start, place = places[bisect_right(starts, position) - 1]
            return place + position - start

        return [(original(begin), original(end - 1) + 1) for begin, end in self._find_forms(joined)]

    def _find_at_cut(self, text: str, cut: int, end: int) -> list[tuple[int, int]]:
        """Find the head of a value before a cut, and the tail of a value after it, with or without line breaks."""
        reach = self.reach_chars
        before = [at for at in range(max(0, cut - reach), cut) if text[at] not in "\r\n"]
        behind = [at for at in range(end, min(len(text), end + reach)) if text[at] not in "\r\n"]
        head, tail = "".join(text[at] for at in before), "".join(text[at] for at in behind)
        begun = max((_count_overlap(head, form) for form in self._forms), default=0)
        ended = max((_count_overlap(form, tail) for form in self._forms), default=0)
        found = [(before[-begun], before[-1] + 1)] if begun else []
        return [*found, (behind[0], behind[ended - 1] + 1)] if ended else found

    def _mask_value(self, value: Any, field: str) -> Any:
        if isinstance(value, str):
            is_picture = field in BINARY_FIELDS or (field in IMAGE_FIELDS and value.startswith("data:"))
            return value if is_picture else self.mask_text(value)
        if isinstance(value, Mapping):
            return {self.mask_text(str(name)): self._mask_value(inner, str(name)) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._mask_value(inner, field) for inner in value]
        return value


def _join_lines(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text with its lines joined, and the start of each line in both texts."""
    joined = []
    places = []
    at = length = 0
    for line in text.split("\n"):
        kept = line.rstrip("\r") or "\n"
        places.append((length, at))
        joined.append(kept)
        length += len(kept)
        at += len(line) + 1
    return "".join(joined), places


def _mask_spans(text: str, spans: Iterable[tuple[int, int]]) -> str:
    pieces = []
    end = 0
    for begin, next_end in spans:
        pieces += [text[end:begin], MASK]
        end = next_end
    return "".join([*pieces, text[end:]])


def find_cuts(text: str) -> list[tuple[int, int]]:
    """Return the positions of markers for left-out text, in order."""
    found = []
    for cut in CUT_MARKERS:
        at = text.find(cut)
        while at >= 0:
            found.append((at, at + len(cut)))
            at = text.find(cut, at + len(cut))
    return sorted(found)


def _count_overlap(left: str, right: str) -> int:
    """Return the longest overlap of `left`'s end and `right`'s start; 0 if it is too short to be significant."""
    if right[:MIN_CUT_CHARS] not in left:
        return 0
    longest = min(len(left), len(right))
    return next((n for n in range(longest, MIN_CUT_CHARS - 1, -1) if left.endswith(right[:n])), 0)


class MaskedPieces:
    """Masks a text that arrives in pieces, such as a streamed model reply."""

    def __init__(self, masker: Masker) -> None:
        self._masker = masker
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return the text that can be shown now.

        The last characters are held back while a secret may start in them.
        """
        if not self._masker:
            return piece
        self._held += piece
        end = len(self._held) - self._masker.reach_chars - max(map(len, CUT_MARKERS))
        if end <= 0:
            return ""
        spans = self._masker.find_spans(self._held)
        whole = spans + [(begin, cut_end + self._masker.reach_chars) for begin, cut_end in find_cuts(self._held)]
        while True:
            earlier = self._line_start(min([end, *(begin for begin, after in whole if begin < end < after)]))
            if earlier == end:
                break
            end = earlier
        shown, self._held = self._held[:end], self._held[end:]
        return _mask_spans(shown, [span for span in spans if span[1] <= end])

    def _line_start(self, at: int) -> int:
        """Return the start of the line, because a dump is recognised by the start of its lines.

        Longer lines are no dump.
        """
        return self._held.rfind("\n", max(0, at - LINE_BYTES), at) + 1 or (at if at > LINE_BYTES else 0)

    def finish(self) -> str:
        """Return the held-back rest after the last piece."""
        rest, self._held = self._held, ""
        return self._masker.mask_text(rest)
