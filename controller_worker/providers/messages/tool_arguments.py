"""The raw text of a tool call's arguments, as the object that providers want to see again.

Holds: what comes back is strict JSON, whatever a model wrote: servers that read a history refuse the whole request for
one call in it that is none.
"""

from __future__ import annotations

import json
import math
from typing import Any

MALFORMED_ARGUMENTS_KEY = "malformed_arguments"


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return the arguments, or the text itself under a separate key if it is not a JSON object."""
    try:
        parsed = json.loads(arguments or "{}", parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {MALFORMED_ARGUMENTS_KEY: arguments}


def arguments_text(arguments: str) -> str:
    """Return the text as the model wrote it, or as JSON if it is not a JSON object."""
    found = arguments_object(arguments)
    is_kept = bool(arguments) and MALFORMED_ARGUMENTS_KEY not in found
    return arguments if is_kept else json.dumps(found, ensure_ascii=False)


def _refuse(name: str) -> Any:
    """NaN and the infinities are Python's, not JSON's: sent back, they would spoil the whole request."""
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is too large")
    return number
