"""An attempt that is under way, as its driver knows it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from deckhands.attempts.plan import Attempt
from deckhands.attempts.results import Outcome, Row
from deckhands.attempts.watch import Seen

Phase = Literal["begins", "works", "waits", "is scored"]


@dataclass(slots=True, eq=False)
class UnderWay:
    """One attempt.

    Attributes:
        round: how often it was requeued.
        began: when, by the driver's monotonic clock.
        phase: `waits`: for its next try, after a failure of the infrastructure.
        seen: the progress of its current conversation.
        failures: the codes of the infrastructure's failures so far.
        carrying_out: the task that carries it out.
    """

    attempt: Attempt
    round: int
    began: float
    phase: Phase = "begins"
    conversation_id: str = ""
    seen: Seen = field(default_factory=Seen)
    failures: list[str] = field(default_factory=list)
    carrying_out: asyncio.Task[Row] | None = None

    @property
    def starts(self) -> bool:
        """Whether it waits for its first tool, and so for its sandbox."""
        return self.phase == "begins" or (self.seen.wait_reason == "tool" and self.seen.iterations <= 1)

    def row(self, outcome: Outcome, cause: str) -> Row:
        """Return the row of an attempt that ends now, whatever it has done."""
        return unscored(self.attempt, self.round, outcome, cause).model_copy(
            update={
                "conversation_id": self.conversation_id,
                "failures": list(self.failures),
                "tries": max(1, len(self.failures)),
                "iterations": self.seen.iterations,
                "cost_usd": self.seen.cost_usd,
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
