"""What the money of a conversation went to, as its log tells.

Holds: a value made from events; the parts add up to what the replies cost.
Does not: know what calls cost that brought no reply; the ledger keeps what was reserved for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from broker.contract import Action, ConversationCreated, Event, ModelCallFailed, ModelReply


@dataclass(frozen=True, slots=True)
class Spending:
    """Where it went, in USD.

    Attributes:
        work_usd: replies that led on, and critics' verdicts.
        retries_usd: replies of which no tool call could be understood, so that the model was asked again.
        loops_usd: replies that say and call exactly what the one before them did.
        condensation_usd: summaries of long histories.
        calls: replies in all.
        failed_calls: calls that brought none.
        unpriced_calls: replies whose price is not known; they count as nothing.
    """

    work_usd: float = 0.0
    retries_usd: float = 0.0
    loops_usd: float = 0.0
    condensation_usd: float = 0.0
    calls: int = 0
    failed_calls: int = 0
    unpriced_calls: int = 0

    @property
    def spent_usd(self) -> float:
        """All of it."""
        return self.work_usd + self.retries_usd + self.loops_usd + self.condensation_usd

    def __add__(self, other: Spending) -> Spending:
        return Spending(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Spending)))


def spending_of(events: Iterable[Event]) -> Spending:
    """Return what a conversation's money went to."""
    log = list(events)
    understood = {
        event.tool_call_metadata.reply_id for event in log if isinstance(event, Action) and event.tool_call_metadata
    }
    total, before = Spending(), None
    inherited = log[0].forked_at if log and isinstance(log[0], ConversationCreated) else 0  # another one has paid it
    for event in log[inherited:]:
        if isinstance(event, ModelCallFailed):
            total += Spending(failed_calls=1)
        if not isinstance(event, ModelReply):
            continue
        cost = event.cost_usd or 0.0
        counted = Spending(calls=1, unpriced_calls=int(event.cost_usd is None))
        if event.service == "condenser":
            total += counted + Spending(condensation_usd=cost)
            continue
        if event.service == "critic":
            total += counted + Spending(work_usd=cost)
            continue
        said = (event.content, tuple((call.name, call.arguments) for call in event.tool_calls))
        if event.tool_calls and event.id not in understood:
            total += counted + Spending(retries_usd=cost)
        elif said == before:
            total += counted + Spending(loops_usd=cost)
        else:
            total += counted + Spending(work_usd=cost)
        before = said
    return total
