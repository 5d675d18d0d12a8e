"""What every wire form reads from a reply, before it is timed and priced.

Holds: why a reply has stopped decides what it is: a refusal is no reply, whatever stands before it, and a call that the
limit of length has cut is not carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from controller_worker.providers.errors import ContentPolicyError, NoResponseError
from controller_worker.providers.llm import Completion, Usage
from controller_worker.providers.messages.messages import ToolCall

CUT_CALL = (
    "This call was not carried out: the reply reached its limit of length within it. "
    "Call it again with shorter arguments, or in several steps."
)
"""What the model reads."""
LARGEST_COST_USD = 10_000.0
"""No call costs more."""
TOKENS_LIMIT = 1_000_000_000
"""More is not a number of tokens, and nothing that budgets could count."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The parts of a completion that a reply holds; see `Completion`.

    Attributes:
        service_tier: that the provider has used; empty if it does not say.
        told_usd: what the provider says that the call cost; None if it does not say.
    """

    text: str
    tool_calls: tuple[ToolCall, ...]
    thinking_blocks: tuple[Mapping[str, Any], ...]
    model: str
    response_id: str
    stop_reason: str
    usage: Usage
    service_tier: str = ""
    told_usd: float | None = None

    def completion(
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


def usable(reply: Reply, *, refusal: str = "") -> Reply:
    """Return what may be used of a reply.

    Args:
        refusal: the model's or the provider's own words for not answering.

    Raises:
        ContentPolicyError: the answer was refused.
        NoResponseError: there is nothing in it.
    """
    is_empty = not (reply.text or reply.tool_calls)
    if reply.stop_reason == "content_filter" or (not reply.text and refusal):
        raise ContentPolicyError(refusal or "The model refused to answer.", provider_text=refusal)
    if is_empty:
        raise NoResponseError("The reply has no content.")
    if reply.stop_reason == "length" and reply.tool_calls:  # only the last one can be cut
        *whole, last = reply.tool_calls
        return replace(reply, tool_calls=(*whole, replace(last, problem=last.problem or CUT_CALL)))
    return reply


def token_count(value: Any) -> int:
    """Return a number of tokens as a provider gave it; what is no count is 0, so that no cost is negative or absurd."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= TOKENS_LIMIT else 0


def told_usd(value: Any) -> float | None:
    """Return what a provider or a gateway says that a call cost, or None if it says nothing that can be true."""
    try:
        cost = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if isinstance(value, bool):
        return None
    return cost if 0.0 <= cost <= LARGEST_COST_USD else None


def counts_of(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the usage of a reply; one of another form is none: the reply is paid for, and no worse for it."""
    usage = reply.get("usage")
    return usage if isinstance(usage, Mapping) else {}
