"""What a provider's headers say is left of a quota, in one vocabulary.

Holds: what is no count is left out.
Does not: read when a quota is full again; that is the governor's to work out from its limits.
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


def quota_left(headers: Mapping[str, str], *, prefix: str = "") -> dict[str, int]:
    """Return how many requests and tokens are left: `requests`, `input`, `output`, `tokens` → how many.

    Args:
        headers: names in lower case, or of any case where the mapping does not mind.
        prefix: what stands before each name.
    """
    found: dict[str, int] = {}
    for header, what in _LEFT.items():
        text = str(headers.get(prefix + header) or "").strip()
        if text.isascii() and text.isdigit():
            found[what] = int(text)
    return found
