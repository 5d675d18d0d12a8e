"""JSON values that the log can store: no lone surrogates, no NaN, no integers beyond 64 bits."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator

MAX_JSON_DEPTH = 100


def replace_surrogates(value: Any) -> Any:
    """Copy JSON values, replacing lone surrogates by U+FFFD."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_surrogates(item) for item in value]
    return value


def to_plain_json(value: Any, depth: int = 0) -> Any:
    """Copy a value in the form that the log can store, so that the value in memory equals the stored one.

    Lone surrogates become U+FFFD, NaN and infinities become null, integers beyond 64 bits become text, tuples become
    lists.

    Raises:
        ValueError: it is not JSON, or nested more than a hundred levels deep.
    """
    if isinstance(value, str):
        return replace_surrogates(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 64 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= MAX_JSON_DEPTH:
        raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep")
    if isinstance(value, dict):
        return {_json_name(key): to_plain_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_json(item, depth + 1) for item in value]
    raise ValueError(f"a {type(value).__name__} is not JSON")


def _json_name(key: Any) -> str:
    if not isinstance(key, str):
        raise ValueError(f"a name is a {type(key).__name__}, not a text")  # noqa: TRY004  (pydantic collects ValueError)
    return str(replace_surrogates(key))


JsonObject = Annotated[dict[str, Any], AfterValidator(to_plain_json)]
"""An object of any shape inside an event."""
