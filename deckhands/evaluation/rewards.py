"""Rewards of an attempt: numbers from a check, from the scorer of a dataset, or from a Python scorer.

    {"reward": 0.5, "metrics": {"speed": 3.2}, "steps": [0, 0.5], "resolved": false, "explanation": "half of it"}

Holds: rewards are finite numbers, and are never rounded to right or wrong.
Does not: bound rewards; most datasets use 0 to 1, where 1 is right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_METRICS, MAX_NAME_CHARS, MAX_STEPS, MAX_LINE_CHARS = 100, 100, 10_000, 100_000
KEYS = frozenset({"reward", "metrics", "steps", "resolved", "explanation"})


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards of an attempt.

    Attributes:
        reward: the reward of the whole attempt; None if there is none.
        metrics: further numbers, by name.
        steps: one for each step of the agent, in order; empty for none.
        resolved: whether the attempt is right; None if the reward decides, which must then be at least 1.
    """

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    steps: Sequence[float] = ()
    resolved: bool | None = None
    explanation: str = ""

    @property
    def is_resolved(self) -> bool:
        """Whether the attempt is right, according to them."""
        return self.resolved if self.resolved is not None else (self.reward or 0.0) >= 1.0


def parse_rewards(value: object) -> Rewards:
    """Return the rewards that a value states: true or false, a number, or a mapping as above.

    Raises:
        ValueError: the value has none of these forms; the text has the reason.
    """
    if isinstance(value, Rewards):
        value = {
            "metrics": value.metrics,
            "steps": value.steps,
            "explanation": value.explanation,
            **{key: found for key in ("reward", "resolved") if (found := getattr(value, key)) is not None},
        }
    if isinstance(value, bool | int | float):
        return Rewards(_number("the reward", value))
    if not isinstance(value, Mapping):
        raise ValueError(f"{type(value).__name__} is neither a number nor a mapping")  # noqa: TRY004  (one error)
    if unknown := sorted(map(str, set(value) - KEYS)):
        raise ValueError(f"{unknown[0]!r} is not a key of rewards")
    metrics, steps = value.get("metrics") or {}, value.get("steps") or ()
    if not isinstance(metrics, Mapping) or len(metrics) > MAX_METRICS:
        raise ValueError(f"metrics is not a mapping of at most {MAX_METRICS} names")
    if isinstance(steps, str) or not isinstance(steps, Sequence) or len(steps) > MAX_STEPS:
        raise ValueError(f"steps is not a list of at most {MAX_STEPS:,} numbers")
    resolved = value.get("resolved")
    if resolved is not None and not isinstance(resolved, bool):
        raise ValueError("resolved is neither true nor false")
    return Rewards(
        _number("the reward", value["reward"]) if value.get("reward") is not None else None,
        {_name(name): _number(f"the metric {name}", found) for name, found in metrics.items()},
        tuple(_number("a step", found) for found in steps),
        resolved,
        str(value.get("explanation") or ""),
    )


def find_rewards(output: str) -> Rewards | None:
    """Return the rewards in the last line of a check's output; None if it has none."""
    last = output.rstrip().rpartition("\n")[2].strip()
    if not last.startswith("{") or len(last) > MAX_LINE_CHARS:
        return None
    try:
        return parse_rewards(json.loads(last))
    except (ValueError, RecursionError):
        return None


def _number(what: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, bool | int | float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{what} is {str(value)[:50]!r}, which is not a finite number")
    return number


def _name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise ValueError(f"a metric has no name of at most {MAX_NAME_CHARS} characters")
    return name
