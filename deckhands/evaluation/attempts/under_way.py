"""An attempt that is under way, as its driver knows it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from broker.log import Progress
from deckhands.evaluation.attempts.plan import Attempt
from deckhands.evaluation.attempts.results import Outcome, Row

Phase = Literal["begins", "works", "waits", "is scored"]


@dataclass(slots=True, eq=False)
class UnderWay:
    """One attempt.

    Attributes:
        round: how often it was requeued.
        began: when, by the driver's monotonic clock.
        phase: `waits`: for its next try, after a failure of the infrastructure.
        seen: the progress of its current conversation.
        judged: the progress of its critic.
        shared: what its conversation has of another one, that it is a fork of: steps and cost.
        failures: the codes of the infrastructure's failures so far.
        lost_cost_usd: what the tries have cost that these ended.
        carrying_out: the task that carries it out.
    """

    attempt: Attempt
    round: int
    began: float
    phase: Phase = "begins"
    conversation_id: str = ""
    seen: Progress = field(default_factory=Progress)
    judged: Progress = field(default_factory=Progress)
    shared: tuple[int, float] = (0, 0.0)
    failures: list[str] = field(default_factory=list)
    lost_cost_usd: float = 0.0
    carrying_out: asyncio.Task[Row] | None = None

    @property
    def starts(self) -> bool:
        """Whether it waits for its first tool, and so for its sandbox."""
        return self.phase == "begins" or (self.seen.wait_reason == "tool" and self.seen.iterations <= 1)

    @property
    def cost_usd(self) -> float:
        """What its current try has cost."""
        return round(max(0.0, self.seen.cost_usd - self.shared[1]), 8)

    @property
    def spent_usd(self) -> float:
        """What it has cost in all, with its critic and the tries that failed."""
        return self.cost_usd + self.judged.cost_usd + self.lost_cost_usd

    def row(self, outcome: Outcome, cause: str) -> Row:
        """Return the row of an attempt that ends now, whatever it has done."""
        return unscored(self.attempt, self.round, outcome, cause).model_copy(
            update={
                "conversation_id": self.conversation_id,
                "failures": list(self.failures),
                "tries": max(1, len(self.failures)),
                "iterations": max(0, self.seen.iterations - self.shared[0]),
                "cost_usd": self.cost_usd,
                "critic_cost_usd": self.judged.cost_usd,
                "lost_cost_usd": self.lost_cost_usd,
            }
        )


def unscored(attempt: Attempt, round_: int, outcome: Outcome, cause: str) -> Row:
    """Return the row of an attempt that has not begun."""
    return Row(
        instance=attempt.instance.id,
        model=attempt.model,
        attempt=attempt.number,
        outcome=outcome,
        cause=cause,
        round=round_,
        tags=list(attempt.instance.tags),
    )
