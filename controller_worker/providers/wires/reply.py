"""The common fields of a reply in all wire formats, before latency and cost are added.

`parse_quota_left` reads the remaining quota from a provider's headers.

Holds: the stop reason decides how a reply is used. A refusal is an error, whatever text precedes it. A call cut off by
the length limit does not run. Values that are not counts are left out.
Does not: read when a quota resets; the governor computes that from its limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from controller_worker.providers.errors import ContentPolicyError, NoResponseError
from controller_worker.providers.llm import CallUsage, Completion
from controller_worker.providers.messages.messages import ToolCall

CUT_CALL = (
    "This call was not carried out: the reply reached its limit of length within it. "
    "Call it again with shorter arguments, or in several steps."
)
"""The text that the model reads."""
LARGEST_COST_USD = 10_000.0
"""The largest plausible cost of a call."""
TOKENS_LIMIT = 1_000_000_000
"""The largest plausible token count."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """The parts of a completion that a reply contains; see `Completion`.

    Attributes:
        service_tier: the tier reported by the provider; empty without one.
        reported_usd: the cost reported by the provider; None without one.
    """

    text: str
    tool_calls: tuple[ToolCall, ...]
    thinking_blocks: tuple[Mapping[str, Any], ...]
    model: str
    response_id: str
    stop_reason: str
    usage: CallUsage
    service_tier: str = ""
    reported_usd: float | None = None

    def to_completion(
        self,
        *,
        cost_usd: float | None,
        latency_seconds: float,
        quota_left: Mapping[str, int] | None = None,
        is_usage_estimated: bool = False,
    ) -> Completion:
        """Return the completion."""
        return Completion(
            text=self.text,
            tool_calls=self.tool_calls,
            thinking_blocks=self.thinking_blocks,
            model=self.model,
            response_id=self.response_id,
            stop_reason=self.stop_reason,
            usage=self.usage,
            cost_usd=cost_usd,
            latency_seconds=latency_seconds,
            quota_left=quota_left or {},
            is_usage_estimated=is_usage_estimated,
        )


def require_usable(reply: ParsedReply, *, refusal: str = "") -> ParsedReply:
    """Return the usable part of a reply.

    Args:
        refusal: the model's or the provider's text of a refusal.

    Raises:
        ContentPolicyError: the answer was refused.
        NoResponseError: the reply is empty or blank.
    """
    # A zero-width space is neither white space nor printable.
    has_text = any(character.isprintable() and not character.isspace() for character in reply.text)
    if reply.stop_reason == "content_filter" or (not has_text and refusal):
        raise ContentPolicyError(refusal or "The model refused to answer.", provider_text=refusal)
    if not has_text and not reply.tool_calls:
        raise NoResponseError("The reply has no content.")
    if reply.stop_reason == "length" and reply.tool_calls:  # only the last call can be cut off
        *whole, last = reply.tool_calls
        return replace(reply, tool_calls=(*whole, replace(last, problem=last.problem or CUT_CALL)))
    return reply


def parse_token_count(value: Any) -> int:
    """Return a provider's token count; 0 if it is not a count, so that no cost is negative or absurd."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= TOKENS_LIMIT else 0


def parse_reported_usd(value: Any) -> float | None:
    """Return the cost reported by a provider or a gateway; None without a plausible one."""
    try:
        cost = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if isinstance(value, bool):
        return None
    return cost if 0.0 <= cost <= LARGEST_COST_USD else None


def get_counts(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the usage of a reply; empty if malformed, because the reply is paid for and usable without it."""
    usage = reply.get("usage")
    return usage if isinstance(usage, Mapping) else {}


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
