"""The driver's state of an attempt in flight."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from broker.log import ConversationProgress
from deckhands.evaluation.attempts.plan import Attempt
from deckhands.evaluation.attempts.results import AttemptRow, Outcome

Phase = Literal["begins", "works", "waits", "is scored"]


@dataclass(slots=True, eq=False)
class AttemptInFlight:
    """One attempt in flight.

    Attributes:
        round: how often it was requeued.
        began: its start time, by the driver's monotonic clock.
        phase: `waits`: for its next try, after a failure of the infrastructure.
        seen: the progress of its current conversation.
        judged: the progress of its critic.
        shared: the steps, cost and tokens that its conversation shares with its origin, if it is a fork.
        failures: the codes of the infrastructure's failures so far; `cause` is the last failure as text.
        is_found: its current conversation was started by an earlier driver.
        replies: the replies of its current conversation that were counted.
        lost_cost_usd, lost_tokens: of tries that ended in these failures.
        carrying_out: the asyncio task that runs it.
    """

    attempt: Attempt
    round: int
    started: float
    phase: Phase = "begins"
    conversation_id: str = ""
    seen: ConversationProgress = field(default_factory=ConversationProgress)
    judged: ConversationProgress = field(default_factory=ConversationProgress)
    shared: tuple[int, float, int] = (0, 0.0, 0)
    failures: list[str] = field(default_factory=list)
    cause: str = ""
    is_found: bool = False
    replies: int = 0
    lost_cost_usd: float = 0.0
    lost_tokens: int = 0
    runner: asyncio.Task[AttemptRow] | None = None

    @property
    def is_starting(self) -> bool:
        """Whether it waits for its first tool, and so for its sandbox."""
        return self.phase == "begins" or (self.seen.wait_reason == "tool" and self.seen.iterations <= 1)

    @property
    def cost_usd(self) -> float:
        """The cost of its current try."""
        return round(max(0.0, self.seen.cost_usd - self.shared[1]), 8)

    @property
    def spent_usd(self) -> float:
        """Its total cost, with its critic and failed tries."""
        return self.cost_usd + self.judged.cost_usd + self.lost_cost_usd

    @property
    def spent_tokens(self) -> int:
        """All of its tokens, with its critic and failed tries."""
        return max(0, self.seen.tokens - self.shared[2]) + self.judged.tokens + self.lost_tokens

    def build_row(self, outcome: Outcome, cause: str) -> AttemptRow:
        """Return the row of an attempt that ends now, in any state."""
        return build_unscored_row(self.attempt, self.round, outcome, cause).model_copy(
            update={
                "conversation_id": self.conversation_id,
                "failures": list(self.failures),
                "tries": max(1, len(self.failures)),
                "iterations": max(0, self.seen.iterations - self.shared[0]),
                "cost_usd": self.cost_usd,
                "critic_cost_usd": self.judged.cost_usd,
                "lost_cost_usd": self.lost_cost_usd,
                "critic_tokens": self.judged.tokens,
                "lost_tokens": self.spent_tokens - self.judged.tokens,
                "has_unknown_cost": self.seen.has_unknown_cost or self.judged.has_unknown_cost,
            }
        )


def build_unscored_row(attempt: Attempt, round_: int, outcome: Outcome, cause: str) -> AttemptRow:
    """Return the row of an attempt that has not started."""
    return AttemptRow(
        instance=attempt.instance.id,
        model=attempt.model,
        attempt=attempt.number,
        outcome=outcome,
        cause=cause,
        round=round_,
        tags=list(attempt.instance.tags),
    )
