"""The latest call of each kind, which says what the next one of that kind will be like.

A kind is a model and what it was asked for: a condenser's summary says nothing of what a step costs, and one model
nothing of another.

Holds: a function of the log; a count that cannot be true moves an estimate by no more than the bounds below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from broker.contract import ModelReply

KINDS_LIMIT = 16
"""So many kinds are remembered, those that were asked last."""
SMALLEST_RATIO = 0.5
LARGEST_RATIO = 10.0
"""Our estimates are 0.6 to 1.6 times too high or too low for what people and programs write; what a provider adds to a
short prompt, or a tokenizer that we do not know, can make more of it."""


@dataclass(frozen=True, slots=True)
class LatestCall:
    """The latest reply of one kind, and the longest.

    Attributes:
        service: what was asked for; see `ModelReply`.
        model: as the settings of the workers name it; empty: it was not noted.
        cost_usd: 0 where it was not known.
        prompt_tokens: as the provider counted them.
        estimated_tokens: of the same prompt; 0 where it was not estimated.
    """

    service: str
    model: str = ""
    cost_usd: float = 0.0
    longest_reply_tokens: int = 0
    prompt_tokens: int = 0
    estimated_tokens: int = 0

    @property
    def ratio(self) -> float | None:
        """How many tokens the provider counted for each that was estimated; None where nothing was estimated."""
        return ratio_of(self.prompt_tokens, self.estimated_tokens) if self.estimated_tokens > 0 else None


def ratio_of(prompt_tokens: int, estimated_tokens: int) -> float:
    """Return how many tokens were counted for each that was estimated, within the bounds."""
    thousandths = max(prompt_tokens, 0) * 1_000 // max(estimated_tokens, 1)  # a fraction of any size would overflow
    return min(max(thousandths, round(SMALLEST_RATIO * 1_000)), round(LARGEST_RATIO * 1_000)) / 1_000


def corrected(estimated_tokens: int, ratio: float) -> int:
    """Return how many tokens a prompt will have."""
    return math.ceil(estimated_tokens * ratio)


def noted(calls: tuple[LatestCall, ...], reply: ModelReply) -> tuple[LatestCall, ...]:
    """Return the latest calls after one more reply, the latest of all at the end."""
    estimate = reply.estimate
    model = estimate.model if estimate is not None else ""
    before = next((call for call in calls if (call.service, call.model) == (reply.service, model)), None)
    latest = LatestCall(
        service=reply.service,
        model=model,
        cost_usd=reply.cost_usd or 0.0,
        longest_reply_tokens=max(
            before.longest_reply_tokens if before is not None else 0, reply.usage.completion_tokens
        ),
        prompt_tokens=reply.usage.prompt_tokens,
        estimated_tokens=estimate.prompt_tokens if estimate is not None else 0,
    )
    return (*(call for call in calls if call is not before), latest)[-KINDS_LIMIT:]


def latest_of(calls: tuple[LatestCall, ...], service: str, model: str | None) -> LatestCall | None:
    """Return the latest call of a kind, or that of the service whose model was not noted; None if there was none.

    Args:
        model: None where it is not known: that of any model counts.
    """
    return next(
        (call for call in reversed(calls) if call.service == service and (model is None or call.model in (model, ""))),
        None,
    )
