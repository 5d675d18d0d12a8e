"""JSON by the compiled half of the standard library's `json` alone.

The other half brings `re`, `enum` and `functools` with it. They take 10 ms to import, which is a third of the time in
which a host starts, and nothing else that a host needs at its start would use them.

Holds: texts and values are those of `json.dumps` (ASCII, no blanks) and `json.loads`.
"""

from __future__ import annotations

import _json

_BLANKS = " \t\n\r"


class _Decoding:
    """What the scanner asks of a decoder."""

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
        TypeError, ValueError: it is not a JSON value, or contains itself.
    """
    encode = _json.make_encoder({}, _refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, True)
    return "".join(encode(value, 0))


def loads(text: bytes) -> object:
    """Return the value of a JSON text in UTF-8.

    Raises:
        ValueError: it is not JSON.
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
