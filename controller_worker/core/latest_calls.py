"""The latest call of each kind, used to estimate the next one.

A kind is a model and a service: the cost of a condenser's summary does not predict the cost of a step, and one model
does not predict another.

Holds: a function of the log. An implausible count moves an estimate by no more than the bounds below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from broker.contract import ModelReply

MAX_KINDS = 16
"""Number of remembered kinds; the most recent ones are kept."""
SMALLEST_RATIO = 0.5
LARGEST_RATIO = 10.0
"""Our estimates are wrong by a factor of 0.6 to 1.6 for texts of users and programs. A provider's addition to a short
prompt, or an unknown tokenizer, can make the factor larger.
"""


@dataclass(frozen=True, slots=True)
class LatestCall:
    """The latest reply of one kind, and the longest.

    Attributes:
        service: the purpose of the call; see `ModelReply`.
        model: the name in the workers' settings; empty if it was not recorded.
        cost_usd: 0 if unknown.
        prompt_tokens: the provider's count.
        estimated_tokens: our estimate for the same prompt; 0 if there was none.
    """

    service: str
    model: str = ""
    cost_usd: float = 0.0
    longest_reply_tokens: int = 0
    prompt_tokens: int = 0
    estimated_tokens: int = 0

    @property
    def ratio(self) -> float | None:
        """Counted tokens per estimated token; None without an estimate."""
        return compute_ratio(self.prompt_tokens, self.estimated_tokens) if self.estimated_tokens > 0 else None


def compute_ratio(prompt_tokens: int, estimated_tokens: int) -> float:
    """Return counted tokens per estimated token, within the bounds."""
    thousandths = max(prompt_tokens, 0) * 1_000 // max(estimated_tokens, 1)  # a fraction of any size would overflow
    return min(max(thousandths, round(SMALLEST_RATIO * 1_000)), round(LARGEST_RATIO * 1_000)) / 1_000


def correct_estimate(estimated_tokens: int, ratio: float) -> int:
    """Return the expected number of tokens of a prompt."""
    return math.ceil(estimated_tokens * ratio)


def add_call(calls: tuple[LatestCall, ...], reply: ModelReply) -> tuple[LatestCall, ...]:
    """Return the latest calls after one more reply, with that reply last."""
    estimate = reply.estimate
    model = estimate.model if estimate is not None else ""
    before = None
    for call in calls:
        if call.service == reply.service and call.model == model:
            before = call
            break
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
    return (*[call for call in calls if call is not before], latest)[-MAX_KINDS:]


def find_latest_call(calls: tuple[LatestCall, ...], service: str, model: str | None) -> LatestCall | None:
    """Return the latest call of a kind, or of the service without a recorded model; None if there was none.

    Args:
        model: None if unknown: then a call to any model counts.
    """
    return next(
        (call for call in reversed(calls) if call.service == service and (model is None or call.model in (model, ""))),
        None,
    )
