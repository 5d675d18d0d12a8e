"""The figures of an evaluation, recomputed from its rows alone.

Sources: pass@k is the unbiased estimator of Chen et al. (2021), 1 - C(n-c, k) / C(n, k), averaged over instances. The
interval of pass@1 is Wilson's for one attempt per instance, and uses the standard error over instances for more; it is
Wilson's over instances if all have the same share, which has no standard error. Two runs are compared by McNemar's
exact test over the instances that both have.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deckhands.evaluation.attempts.results import OUTCOMES, AttemptRow

Z = 1.959964
"""The quantile of the normal distribution for 95 %."""


def pass_at(n: int, c: int, k: int) -> float:
    """Estimate the probability that one of `k` attempts is right, from `n` attempts with `c` right ones."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def wilson(right: float, of: int) -> tuple[float, float]:
    """Return the 95 % interval of a share."""
    if not of:
        return 0.0, 1.0
    share = right / of
    middle = (share + Z * Z / (2 * of)) / (1 + Z * Z / of)
    half = Z * math.sqrt(share * (1 - share) / of + Z * Z / (4 * of * of)) / (1 + Z * Z / of)
    return max(0.0, middle - half), min(1.0, middle + half)


def compute_summary(rows: Iterable[AttemptRow]) -> dict[str, Any]:
    """Return the figures of each model, as plain JSON values."""
    by_model: dict[str, list[AttemptRow]] = defaultdict(list)
    for row in rows:
        by_model[row.model].append(row)
    return {"models": {model: _figures(found) for model, found in sorted(by_model.items())}}


def _figures(rows: Sequence[AttemptRow]) -> dict[str, Any]:
    instances = _by_instance(rows)
    counted = {name: found for name, found in instances.items() if found}
    counts = [(len(found), sum(row.outcome == "resolved" for row in found)) for found in counted.values()]
    most = min((n for n, _ in counts), default=0)
    passes = {f"pass@{k}": statistics.fmean(pass_at(n, c, k) for n, c in counts) for k in range(1, most + 1)}
    ran = [row for row in rows if row.outcome != "not-run"] or rows
    conversations = sum(row.conversations for row in rows)
    failures = sum(len(row.failures) for row in rows)
    waiting: dict[str, float] = defaultdict(float)
    for row in rows:
        for reason, seconds in row.waiting_seconds.items():
            waiting[reason] += seconds
    tags: dict[str, list[AttemptRow]] = defaultdict(list)
    for row in rows:
        for tag in row.tags:
            tags[tag].append(row)
    return {
        "instances": len(instances),
        "attempts": len(rows),
        "outcomes": {name: sum(row.outcome == name for row in rows) for name in OUTCOMES},
        "causes": dict(sorted(Counter(row.cause for row in rows if row.cause).items())),
        **passes,
        "pass@1_interval": _interval(counts),
        "conversations": conversations,
        "infrastructure_failures": failures,
        "infrastructure_failures_per_1000": 1000 * failures / conversations if conversations else 0.0,
        "cost_usd": {"total": math.fsum(row.cost_usd for row in rows), **_spread([row.cost_usd for row in ran])},
        "critic_cost_usd": math.fsum(row.critic_cost_usd for row in rows),
        "lost_cost_usd": math.fsum(row.lost_cost_usd for row in rows),
        "has_unknown_cost": any(row.has_unknown_cost for row in rows),
        "tokens": sum(row.prompt_tokens + row.completion_tokens for row in rows),
        "iterations": _spread([row.iterations for row in ran]),
        "seconds": _spread([row.seconds for row in ran]),
        "working_seconds": round(math.fsum(row.working_seconds for row in rows), 3),
        "waiting_seconds": {name: round(seconds, 3) for name, seconds in sorted(waiting.items())},
        "tags": {
            tag: {"attempts": len(found), "resolved": sum(row.outcome == "resolved" for row in found)}
            for tag, found in sorted(tags.items())
        },
    }


def further_costs(figures: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the costs of a model's attempts beside `cost_usd`, by purpose; without zeros."""
    parts = (("critics", figures["critic_cost_usd"]), ("tries that failed", figures["lost_cost_usd"]))
    return [(what, usd) for what, usd in parts if usd]


def _by_instance(rows: Iterable[AttemptRow]) -> dict[str, list[AttemptRow]]:
    found: dict[str, list[AttemptRow]] = {}
    for row in rows:
        attempts = found.setdefault(row.instance, [])
        if row.counts:
            attempts.append(row)
    return found


def _interval(counts: Sequence[tuple[int, int]]) -> list[float]:
    if not counts or all(n == 1 for n, _ in counts):
        return list(wilson(sum(c for _, c in counts), len(counts)))
    shares = [c / n for n, c in counts]
    if len(shares) > 1 and len(set(shares)) == 1:
        return list(wilson(sum(shares), len(shares)))
    mean = statistics.fmean(shares)
    half = Z * statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else 1.0
    return [max(0.0, mean - half), min(1.0, mean + half)]


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p90": ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)],
        "most": ordered[-1],
    }


def compare_runs(ours: Iterable[AttemptRow], theirs: Iterable[AttemptRow]) -> dict[str, Any]:
    """Compare two runs over their common instances: the number that only one resolves, and the p-value.

    An instance counts as resolved if most of its attempts are.
    """
    first, second = _majorities(ours), _majorities(theirs)
    both = sorted(first.keys() & second.keys())
    only_first = [name for name in both if first[name] and not second[name]]
    only_second = [name for name in both if second[name] and not first[name]]
    return {
        "instances": len(both),
        "resolved": [sum(first[name] for name in both), sum(second[name] for name in both)],
        "only_first": only_first,
        "only_second": only_second,
        "p_value": _sign_test(len(only_first), len(only_second)),
    }


def find_resolved(rows: Iterable[AttemptRow], model: str) -> Mapping[str, bool]:
    """Return for each instance on which a model was scored whether most of its attempts resolve it."""
    return _majorities(row for row in rows if row.model == model)


def _majorities(rows: Iterable[AttemptRow]) -> Mapping[str, bool]:
    found = {name: attempts for name, attempts in _by_instance(rows).items() if attempts}
    return {name: 2 * sum(row.outcome == "resolved" for row in rows) > len(rows) for name, rows in found.items()}


def _sign_test(wins: int, losses: int) -> float:
    """Return the two-sided p-value of McNemar's exact test."""
    n = wins + losses
    tail: float = sum(math.comb(n, k) for k in range(min(wins, losses) + 1)) / 2.0**n
    return min(1.0, 2 * tail)


BINS = 20


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of a value: `counts` by model, in bins of equal width from 0 to `most`."""

    most: float
    counts: Mapping[str, Sequence[int]]


def compute_distribution(rows: Sequence[AttemptRow], value: Callable[[AttemptRow], float]) -> Distribution:
    """Return the distribution of a value over the attempts that were started, with the same bins for each model."""
    ran = [row for row in rows if row.outcome != "not-run"]
    most = max((value(row) for row in ran), default=0.0)
    counts: dict[str, list[int]] = {row.model: [0] * BINS for row in rows}
    for row in ran:
        counts[row.model][min(BINS - 1, int(value(row) / most * BINS)) if most > 0 else 0] += 1
    return Distribution(most, counts)


@dataclass(frozen=True, slots=True)
class FailureClass:
    """Attempts with the same outcome and cause: `attempts` by model."""

    outcome: str
    cause: str
    attempts: Mapping[str, int]


def classify_failures(rows: Iterable[AttemptRow]) -> list[FailureClass]:
    """Return the outcomes of unresolved attempts, most frequent first."""
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row.outcome != "resolved":
            found[row.outcome, row.cause][row.model] += 1
    ordered = sorted(found.items(), key=lambda item: (-item[1].total(), item[0]))
    return [FailureClass(outcome, cause, dict(counts)) for (outcome, cause), counts in ordered]
