"""Stopping criteria that end an evaluation before all attempts have ended.

`ci=3%`    the 95 % interval of each model's pass@1 reaches at most 3 points to either side
`decided`  the first model is known to be better or worse than each of the others on the same instances

Holds: attempts count in their starting order, up to the first that has not ended, so that the result does not depend on
quick attempts alone. A comparison that is checked repeatedly needs a sequential test. Two attempts with the same number
at the same instance form a pair; a pair that only one model resolves counts for that model. Bets on such pairs (a
mixture over all probabilities) win 20 to 1 by chance in at most 5 % of all evaluations, however often they are checked
(Ville's inequality). Majorities of instances cannot be used for bets, because further attempts change them.
Does not: make the interval hold at every check; it is the interval of the report.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from broker.runtime import UsageError
from deckhands.evaluation.attempts.plan import Attempt
from deckhands.evaluation.attempts.results import AttemptRow
from deckhands.evaluation.attempts.statistics import compute_summary, compute_t_quantile, find_resolved, wilson

DECIDED = "decided"
ENOUGH = "enough is known: "
"""The prefix of the cause of attempts that were skipped because enough was known."""
FEWEST_INSTANCES = 20
"""Fewer instances do not show how much results vary."""
ODDS = 20.0
MOST_LOG_ODDS = 700.0
"""The range of a float; more is as good as certain."""

_INTERVAL = re.compile(r"ci=(?:±|\+-|\+/-)?(\d{1,2}(?:\.\d+)?)%?")


@dataclass(frozen=True, slots=True)
class StoppingCriterion:
    """A criterion.

    Attributes:
        half_width: half the width of the interval, as a share; None for `decided`.
    """

    text: str
    half_width: float | None = None

    @classmethod
    def parse(cls, text: str, models: int) -> StoppingCriterion:
        """Parse a criterion.

        Raises:
            UsageError: the text is not a criterion, or compares models although there is only one.
        """
        if text == DECIDED:
            if models < 2:
                raise UsageError("--until decided compares models, and there is one.", remedy="Name more with --model.")
            return cls(text)
        found = _INTERVAL.fullmatch(text)
        if found is None or not 0 < float(found[1]) < 50:
            raise UsageError(f"--until {text!r} is not a criterion.", remedy="Write ci=3% or decided.")
        return cls(text, float(found[1]) / 100)

    def find_reason(self, attempts: Sequence[Attempt], rows: Mapping[tuple[str, str, int], AttemptRow]) -> str:
        """Return the reason to stop, as text; empty if there is not enough evidence.

        Args:
            attempts: all of them, in their starting order.
        """
        ended = list_ended(attempts, rows)
        models = list(dict.fromkeys(attempt.model for attempt in attempts))
        return self._interval(ended, models) if self.half_width is not None else _compare_models(ended, models)

    def find_obstacle(self, instances: int, attempts: int) -> str:
        """Return why the criterion can never be met before all attempts have ended, as text; empty if it can.

        Args:
            attempts: for each instance and model.
        """
        if self.half_width is None:
            fewest = next(n for n in range(1, 100) if compute_odds(n, 0) >= ODDS)
            pairs = instances * attempts
            return "" if pairs > fewest else f"{fewest} pairs of attempts are needed first, and there are {pairs}"
        before_end = instances if attempts > 1 else instances - 1
        if before_end < FEWEST_INSTANCES:
            return f"results of {FEWEST_INSTANCES} instances are needed first, and there are {instances}"
        narrowest = 1.0 - wilson(before_end, before_end)[0]
        if attempts > 1:  # all shares are 1, except that one attempt fails
            narrowest = min(narrowest, compute_t_quantile(instances - 1) / (attempts * instances))
        if narrowest <= self.half_width:
            return ""
        return f"with {instances} instances, the interval is never narrower than ±{narrowest:.1%}"

    def render_obstacle(self, instances: int, attempts: int) -> str:
        """Return a sentence about the obstacle of `find_obstacle`; empty if there is none."""
        why = self.find_obstacle(instances, attempts)
        return f"--until {self.text} can never stop this evaluation early: {why}." if why else ""

    def _interval(self, rows: Sequence[AttemptRow], models: Sequence[str]) -> str:
        assert self.half_width is not None
        figures = compute_summary(rows)["models"]
        for model in models:
            resolved = find_resolved(rows, model)
            if len(resolved) < FEWEST_INSTANCES or "pass@1" not in figures[model]:
                return ""
            share, interval = figures[model]["pass@1"], figures[model]["pass@1_interval"]
            if interval is None:
                return ""
            low, high = interval
            if max(high - share, share - low) > self.half_width:
                return ""
        return f"pass@1 is known to ±{self.half_width:.1%}"


def list_ended(attempts: Sequence[Attempt], rows: Mapping[tuple[str, str, int], AttemptRow]) -> list[AttemptRow]:
    """Return the rows of the attempts up to the first that has not ended."""
    found = []
    for attempt in attempts:
        row = rows.get(attempt.key)
        if row is None:
            break
        found.append(row)
    return found


def compute_odds(wins: int, losses: int) -> float:
    """Return the winnings of bets on unequal chances, each at even odds: 2^n * B(wins + 1, losses + 1)."""
    n = wins + losses
    logarithm = n * math.log(2) + math.lgamma(wins + 1) + math.lgamma(losses + 1) - math.lgamma(n + 2)
    return math.exp(min(logarithm, MOST_LOG_ODDS))


def _compare_models(rows: Sequence[AttemptRow], models: Sequence[str]) -> str:
    resolved: dict[str, dict[tuple[str, int], bool]] = {model: {} for model in models}
    for row in rows:
        if row.counts:
            resolved[row.model][row.instance, row.attempt] = row.outcome == "resolved"
    first = resolved[models[0]]
    said = []
    for other in models[1:]:
        second = resolved[other]
        both = first.keys() & second.keys()
        wins = sum(first[pair] and not second[pair] for pair in both)
        losses = sum(second[pair] and not first[pair] for pair in both)
        if compute_odds(wins, losses) < ODDS:
            return ""
        said.append(f"{models[0]} is {'better' if wins > losses else 'worse'} than {other} ({wins} : {losses})")
    return "; ".join(said)
