"""The figures of an evaluation, recomputed from its rows alone.

Sources: pass@k is the unbiased estimator of Chen et al. (2021), 1 - C(n-c, k) / C(n, k), averaged over instances. The
interval of pass@1 is Wilson's for one attempt per instance, and Student's t over instances for more; it is Wilson's
over instances if all have the same share, because the standard error is then 0. Two runs are compared over their common
instances: by McNemar's exact test, and by the mean difference with its t interval. If all differences are equal, or all
are integers, that interval is the one of Bonett and Price (2012), which adds a pair of each kind. The distribution of t
is computed by the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4.

Holds: an interval that would contain every possible value is None: there are too few instances.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from deckhands.evaluation.attempts.results import OUTCOMES, AttemptRow

Z = 1.959964
"""The quantile of the normal distribution for 95 %."""


MOST_SUMMED = 200
"""With more degrees of freedom, the quantile of t follows from that of the normal distribution."""


@lru_cache(maxsize=1_024)
def compute_t_quantile(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution.

    Args:
        degrees: the degrees of freedom; at least 1.
    """
    if degrees > MOST_SUMMED:  # Abramowitz and Stegun 26.7.5
        terms = (
            Z,
            (Z**3 + Z) / 4,
            (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
            (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
        )
        return math.fsum(term / degrees**power for power, term in enumerate(terms))
    low, high = 1.0, 13.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _compute_t_within(middle, degrees) < 0.95 else (low, middle)
    return (low + high) / 2


def _compute_t_within(t: float, degrees: int) -> float:
    """Return the probability of a value between -t and t."""
    angle = math.atan(t / math.sqrt(degrees))
    square = math.cos(angle) ** 2
    term, total = (math.cos(angle) if degrees % 2 else 1.0), 0.0
    for number in range(degrees % 2 + 1, degrees, 2):
        total += term
        term *= square * number / (number + 1)
    if degrees % 2:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def compute_interval(
    values: Sequence[float], least: float = -math.inf, most: float = math.inf
) -> tuple[float, float] | None:
    """Return the 95 % t interval of a mean; None for too few values, or if it would contain every possible value.

    Args:
        least, most: the bounds of possible values.
    """
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    half = compute_t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    if mean - half <= least and mean + half >= most:
        return None
    return max(least, mean - half), min(most, mean + half)


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
    return {"models": {model: _compute_figures(found) for model, found in sorted(by_model.items())}}


def _compute_figures(rows: Sequence[AttemptRow]) -> dict[str, Any]:
    instances = _group_by_instance(rows)
    counted = _group_scored(rows)
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
        "pass@1_interval": _compute_interval(counts),
        **_compute_reward_figures(counted),
        "conversations": conversations,
        "infrastructure_failures": failures,
        "infrastructure_failures_per_1000": 1000 * failures / conversations if conversations else 0.0,
        "cost_usd": {
            "total": math.fsum(row.cost_usd for row in rows),
            **_compute_spread([row.cost_usd for row in ran]),
        },
        "critic_cost_usd": math.fsum(row.critic_cost_usd for row in rows),
        "lost_cost_usd": math.fsum(row.lost_cost_usd for row in rows),
        "has_unknown_cost": any(row.has_unknown_cost for row in rows),
        "tokens": sum(row.prompt_tokens + row.completion_tokens for row in rows),
        "iterations": _compute_spread([row.iterations for row in ran]),
        "seconds": _compute_spread([row.seconds for row in ran]),
        "working_seconds": round(math.fsum(row.working_seconds for row in rows), 3),
        "waiting_seconds": {name: round(seconds, 3) for name, seconds in sorted(waiting.items())},
        "tags": {
            tag: {"attempts": len(found), "resolved": sum(row.outcome == "resolved" for row in found)}
            for tag, found in sorted(tags.items())
        },
    }


def _compute_reward_figures(instances: Mapping[str, Sequence[AttemptRow]]) -> dict[str, Any]:
    """Return the means of rewards, metrics and critics' scores over instances, without figures that no attempt has."""
    rows = [row for attempts in instances.values() for row in attempts]
    figures: dict[str, Any] = {}
    if any(row.reward is not None for row in rows):
        figures["reward"] = _compute_mean([[get_reward(row) for row in attempts] for attempts in instances.values()])
    if any(row.score is not None for row in rows):
        scores = [[row.score for row in attempts if row.score is not None] for attempts in instances.values()]
        figures["critic_score"] = _compute_mean(scores)
    names = sorted({name for row in rows for name in row.metrics})
    if names:
        figures["metrics"] = {
            name: _compute_mean(
                [[row.metrics[name] for row in attempts if name in row.metrics] for attempts in instances.values()]
            )
            for name in names
        }
    return figures


def get_reward(row: AttemptRow) -> float:
    """Return the reward of an attempt that counts; without a number, 1 if it is resolved, else 0."""
    return row.reward if row.reward is not None else float(row.outcome == "resolved")


def _compute_mean(groups: Iterable[Sequence[float]]) -> dict[str, Any]:
    means = [statistics.fmean(values) for values in groups if values]
    interval = compute_interval(means)
    return {
        "mean": statistics.fmean(means),
        "interval": None if interval is None else list(interval),
        "instances": len(means),
    }


def list_means(figures: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the means of rewards, critics' scores and metrics in a model's figures, by name."""
    named = (("reward", figures.get("reward")), ("critic", figures.get("critic_score")))
    return [(name, found) for name, found in named if found] + list(figures.get("metrics", {}).items())


def format_mean(mean: Mapping[str, Any]) -> str:
    """Format a mean with its interval."""
    interval = mean["interval"]
    within = "no interval: too few instances" if interval is None else f"{interval[0]:.4g} to {interval[1]:.4g}"
    return f"{mean['mean']:.4g} ({within})"


def format_interval(interval: Sequence[float] | None) -> str:
    """Format the interval of a share."""
    if interval is None:
        return "no interval: too few instances"
    return f"{interval[0]:.1%} to {interval[1]:.1%}"


def further_costs(figures: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the costs of a model's attempts beside `cost_usd`, by purpose; without zeros."""
    parts = (("critics", figures["critic_cost_usd"]), ("tries that failed", figures["lost_cost_usd"]))
    return [(what, usd) for what, usd in parts if usd]


def _group_by_instance(rows: Iterable[AttemptRow]) -> dict[str, list[AttemptRow]]:
    found: dict[str, list[AttemptRow]] = {}
    for row in rows:
        attempts = found.setdefault(row.instance, [])
        if row.counts:
            attempts.append(row)
    return found


def _compute_interval(counts: Sequence[tuple[int, int]]) -> list[float] | None:
    if not counts:
        return None
    shares = [c / n for n, c in counts]
    if all(n == 1 for n, _ in counts) or (len(shares) > 1 and len(set(shares)) == 1):
        return list(wilson(sum(shares), len(shares)))
    found = compute_interval(shares, 0.0, 1.0)
    return None if found is None else list(found)


def _compute_spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p90": ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)],
        "most": ordered[-1],
    }


def compare_runs(ours: Sequence[AttemptRow], theirs: Sequence[AttemptRow]) -> dict[str, Any]:
    """Compare two runs over the instances that both have scored.

    An instance counts as resolved if most of its attempts are. `p_value` is McNemar's for these. `difference` is the
    mean over instances of the first run's share of resolved attempts minus the second's, with its `interval`; without
    common instances, both and the p-value are None. `differing` has the instances whose shares differ. `reward` is the
    mean difference of rewards; None if no attempt has a reward. `setup_failed` has the instances that have no score in
    a run because the set-up of each attempt failed.
    """
    first, second = _group_scored(ours), _group_scored(theirs)
    both = sorted(first.keys() & second.keys())
    shares = {name: (_compute_share(first[name]), _compute_share(second[name])) for name in both}
    differences = [one - other for one, other in shares.values()]
    only_first = [name for name, (one, other) in shares.items() if one > 0.5 >= other]
    only_second = [name for name, (one, other) in shares.items() if other > 0.5 >= one]
    interval = _compute_difference_interval(differences)
    has_rewards = any(row.reward is not None for run in (first, second) for name in both for row in run[name])
    rewards = [[statistics.fmean([get_reward(one) for one in run[name]]) for name in both] for run in (first, second)]
    gains = [one - other for one, other in zip(*rewards, strict=True)]
    return {
        "instances": len(both),
        "setup_failed": sorted({name for run in (ours, theirs) for name in _list_unprepared(run)}),
        "resolved": [sum(pair[side] > 0.5 for pair in shares.values()) for side in (0, 1)],
        "only_first": only_first,
        "only_second": only_second,
        "p_value": _compute_sign_test(len(only_first), len(only_second)) if both else None,
        "difference": statistics.fmean(differences) if both else None,
        "interval": None if interval is None else list(interval),
        "differing": [
            {"instance": name, "first": one, "second": other} for name, (one, other) in shares.items() if one != other
        ],
        "reward": _compute_mean([[gain] for gain in gains]) if has_rewards else None,
        "differing_rewards": [
            {"instance": name, "first": one, "second": other}
            for name, one, other in zip(both, *rewards, strict=True)
            if has_rewards and one != other
        ],
    }


def _compute_difference_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean of paired differences from -1 to 1."""
    if not differences:
        return None
    is_whole = all(one in (-1.0, 0.0, 1.0) for one in differences)
    if not is_whole and len(set(differences)) > 1:
        return compute_interval(differences, -1.0, 1.0)
    more = [*differences, 1.0, -1.0]
    mean = statistics.fmean(more)
    half = compute_t_quantile(len(more) - 1) * statistics.pstdev(more) / math.sqrt(len(more))
    return None if half >= 1.0 + abs(mean) else (max(-1.0, mean - half), min(1.0, mean + half))


def find_resolved(rows: Iterable[AttemptRow], model: str) -> Mapping[str, bool]:
    """Return for each instance on which a model was scored whether most of its attempts resolve it."""
    own = _group_scored(row for row in rows if row.model == model)
    return {name: _compute_share(attempts) > 0.5 for name, attempts in own.items()}


def _group_scored(rows: Iterable[AttemptRow]) -> dict[str, list[AttemptRow]]:
    """Return the attempts that count, by instance; instances without one are left out."""
    return {name: attempts for name, attempts in _group_by_instance(rows).items() if attempts}


def _list_unprepared(rows: Iterable[AttemptRow]) -> list[str]:
    """Return the instances with attempts whose set-ups all failed."""
    outcomes: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        outcomes[row.instance].add(row.outcome)
    return [name for name, found in outcomes.items() if found == {"setup_failed"}]


def _compute_share(rows: Sequence[AttemptRow]) -> float:
    return sum(row.outcome == "resolved" for row in rows) / len(rows)


def _compute_sign_test(wins: int, losses: int) -> float:
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
