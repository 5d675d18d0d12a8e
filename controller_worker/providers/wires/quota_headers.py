"""Remaining quota from a provider's headers, in one vocabulary.

Holds: values that are not counts are left out.
Does not: read when a quota resets; the governor computes that from its limits.
"""

from __future__ import annotations

from collections.abc import Mapping

_LEFT = {
    "anthropic-ratelimit-requests-remaining": "requests",
    "anthropic-ratelimit-input-tokens-remaining": "input",
    "anthropic-ratelimit-output-tokens-remaining": "output",
    "anthropic-ratelimit-tokens-remaining": "tokens",
    "x-ratelimit-remaining-requests": "requests",
    "x-ratelimit-remaining-tokens": "tokens",
}


def parse_quota_left(headers: Mapping[str, str], *, prefix: str = "") -> dict[str, int]:
    """Return the remaining `requests`, `input`, `output` and `tokens`, as far as the headers name them.

    Args:
        headers: names in lower case, or a case-insensitive mapping.
        prefix: precedes each header name.
    """
    found: dict[str, int] = {}
    for header, what in _LEFT.items():
        text = str(headers.get(prefix + header) or "").strip()
        if text.isascii() and text.isdigit():
            found[what] = int(text)
    return found
