"""The cost of the model calls in a recording.

OpenHands copies the running totals onto every action (4.7). In our log, each reply has its own cost, and totals are
computed.

Holds: the costs and tokens of the replies add up to the totals of the recording, including calls without an event, such
as those of a condenser or a delegate. If the totals restart because the recording was resumed, they are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.contract import ModelReply
from deckhands.interop.openhands.model_responses import TOKENS, parse_amount, parse_count

NEGLIGIBLE_USD = 1e-9


class RecordedSpending:
    """The totals of a recording, and the part of them assigned to replies."""

    def __init__(self) -> None:
        self.is_known = False
        """The recording names costs at all."""
        self._before: dict[str, float] = dict.fromkeys(("cost", *TOKENS), 0.0)
        self._sums = dict(self._before)
        self._given = dict(self._before)

    def add_totals(self, metrics: Any) -> None:
        """Update the totals from an event."""
        if not isinstance(metrics, Mapping):
            return
        usage, calls = metrics.get("accumulated_token_usage"), metrics.get("token_usages")
        found: dict[str, float] = {}
        cost = parse_amount(metrics.get("accumulated_cost"))
        if cost is not None:
            self.is_known = True
            found["cost"] = cost
        if isinstance(usage, Mapping):
            found |= {name: parse_count(usage.get(name)) for name in TOKENS}
        elif isinstance(calls, list) and calls:  # older versions copied every call onto every action
            listed = [call for call in calls if isinstance(call, Mapping)]
            found |= {name: sum(parse_count(call.get(name)) for call in listed) for name in TOKENS}
        for name, value in found.items():
            if value < self._sums[name]:
                self._before[name] += self._sums[name]
            self._sums[name] = value

    def assign_cost(self, reply: dict[str, Any], *, is_own: bool = False) -> dict[str, Any]:
        """Return a reply's fields with its cost: everything not assigned to an earlier reply.

        Args:
            is_own: the reply itself has its cost.
        """
        usage = {name: parse_count((reply.get("usage") or {}).get(name)) for name in TOKENS}
        cost = parse_amount(reply.get("cost_usd"))
        if not is_own:
            open_tokens = self._open_tokens()
            usage = open_tokens if any(open_tokens.values()) else usage
            cost = self._open("cost") if self.is_known else None
        for name in TOKENS:
            self._given[name] += usage[name]
        self._given["cost"] += cost or 0.0
        return reply | {"usage": usage, "cost_usd": cost}

    def assign_rest(self, reply: ModelReply) -> ModelReply:
        """Return a reply with the unassigned costs added to its own."""
        if not self.has_rest():
            return reply
        more = {name: getattr(reply.usage, name) + tokens for name, tokens in self._open_tokens().items()}
        cost = (reply.cost_usd or 0.0) + self._open("cost") if self._open("cost") else reply.cost_usd
        return reply.model_copy(update={"usage": reply.usage.model_copy(update=more), "cost_usd": cost})

    def has_rest(self) -> bool:
        """Return whether there are unassigned costs."""
        return any(self._open(name) for name in self._sums)

    def _open(self, name: str) -> float:
        left = self._before[name] + self._sums[name] - self._given[name]
        return left if left > NEGLIGIBLE_USD else 0.0

    def _open_tokens(self) -> dict[str, int]:
        return {name: int(self._open(name)) for name in TOKENS}
