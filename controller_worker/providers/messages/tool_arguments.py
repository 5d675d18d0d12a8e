"""Converts the raw arguments of a tool call to the JSON object that providers accept in a history.

Holds: the result is strict JSON, whatever the model wrote. Servers refuse a whole request for one invalid call in it.
"""

from __future__ import annotations

import json
import math
from typing import Any

MALFORMED_ARGUMENTS_KEY = "malformed_arguments"


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return the arguments; if the text is not a JSON object, the text under a key of its own."""
    try:
        parsed = json.loads(arguments or "{}", parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {MALFORMED_ARGUMENTS_KEY: arguments}


def arguments_text(arguments: str) -> str:
    """Return the text unchanged, or re-encoded as JSON if it is not a JSON object."""
    found = arguments_object(arguments)
    is_kept = bool(arguments) and MALFORMED_ARGUMENTS_KEY not in found
    return arguments if is_kept else json.dumps(found, ensure_ascii=False)


def _refuse(name: str) -> Any:
    """Reject NaN and the infinities, which Python parses but JSON forbids. Sent back, they fail the request."""
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is too large")
    return number
