"""The breakdown of a conversation's cost by purpose, read from its log.

Holds: a value made from events; the parts add up to the cost of the replies.
Does not: include failed calls; the ledger keeps their reservations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from broker.contract import Action, ConversationCreated, Event, ModelCallFailed, ModelReply


@dataclass(frozen=True, slots=True)
class Spending:
    """Cost by purpose, in USD.

    Attributes:
        work_usd: replies that made progress, and critics' verdicts.
        retries_usd: replies without an understandable tool call, after which the model was called again.
        loops_usd: replies with exactly the texts and calls of the reply before.
        condensation_usd: summaries of long histories.
        calls: all replies.
        failed_calls: calls without a reply.
        unpriced_calls: replies of unknown price; they count as 0.
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
        """The sum of all parts."""
        return self.work_usd + self.retries_usd + self.loops_usd + self.condensation_usd

    def __add__(self, other: Spending) -> Spending:
        return Spending(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Spending)))


def compute_spending(events: Iterable[Event]) -> Spending:
    """Return the breakdown of a conversation's cost."""
    log = list(events)
    understood = {
        event.tool_call_metadata.reply_id for event in log if isinstance(event, Action) and event.tool_call_metadata
    }
    total, before = Spending(), None
    # another conversation has paid for it
    inherited = log[0].forked_at if log and isinstance(log[0], ConversationCreated) else 0
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
