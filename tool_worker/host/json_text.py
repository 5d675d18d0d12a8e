"""JSON with only the compiled half of the standard library's `json`.

The Python half imports `re`, `enum` and `functools`. This takes 10 ms, a third of a host's start, which needs them for
nothing else.

Holds: results are equal to those of `json.dumps` (ASCII, no blanks) and `json.loads`.
"""

from __future__ import annotations

import _json

_BLANKS = " \t\n\r"


class _Decoding:
    """The attributes that the scanner reads from a decoder."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def _refuse(value: object) -> object:
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


_scan = _json.make_scanner(_Decoding)  # type: ignore[arg-type]  # it takes whatever has these attributes


def dumps(value: object) -> str:
    """Return a value as JSON.

    Raises:
        TypeError, ValueError: the value is not JSON, or contains itself.
    """
    encode = _json.make_encoder({}, _refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, True)
    return "".join(encode(value, 0))


def loads(text: bytes) -> object:
    """Return the value of a JSON text in UTF-8.

    Raises:
        ValueError: the text is not JSON.
        RecursionError: it is nested too deeply.
    """
    written = text.decode("utf-8", "surrogatepass").strip(_BLANKS)
    try:
        value, end = _scan(written, 0)
    except StopIteration as stop:
        raise ValueError(f"no JSON at character {stop.value}") from None
    if end != len(written):
        raise ValueError(f"more than one JSON value, from character {end} on")
    return value
