"""When enough is known."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from deckhands.evaluation.attempts.plan import Attempt
from deckhands.evaluation.attempts.results import AttemptRow
from deckhands.evaluation.attempts.stopping import ODDS, StoppingCriterion, compute_odds, list_ended
from deckhands.evaluation.datasets.instances import Instance

Rows = dict[tuple[str, str, int], AttemptRow]


def attempts(number: int, models: Sequence[str] = ("m",), *, times: int = 1) -> list[Attempt]:
    instances = [Instance(f"i{at}", "task", answer="6") for at in range(number)]
    return [Attempt(one, model, at) for at in range(1, times + 1) for one in instances for model in models]


def rows(ended: Sequence[Attempt], is_right: Sequence[bool]) -> Rows:
    return {
        one.key: AttemptRow(
            instance=one.instance.id,
            model=one.model,
            attempt=one.number,
            outcome="resolved" if right else "unresolved",
        )
        for one, right in zip(ended, is_right, strict=True)
    }


@pytest.mark.parametrize("text", ["ci=3%", "ci=±3%", "ci=+-3%", "ci=3", "ci=+/-3.0%"])
def test_an_interval_is_written_in_several_ways(text: str) -> None:
    assert StoppingCriterion.parse(text, 1).half_width == pytest.approx(0.03)


def test_the_interval_is_reached_with_as_many_as_it_takes() -> None:
    every = attempts(2_000)
    until = StoppingCriterion.parse("ci=5%", 1)
    assert not until.find_reason(every, rows(every[:300], [at % 2 == 0 for at in range(300)]))
    assert "±5.0%" in until.find_reason(every, rows(every[:400], [at % 2 == 0 for at in range(400)]))


def test_equal_shares_of_few_instances_say_little() -> None:
    every = attempts(25, times=2)
    assert not StoppingCriterion.parse("ci=3%", 1).find_reason(every, rows(every, [True] * 50))


def test_quick_attempts_do_not_decide_for_slow_ones() -> None:
    every = attempts(10)
    found = rows(every[1:], [True] * 9)
    assert list_ended(every, found) == []
    found |= rows(every[:1], [False])
    assert len(list_ended(every, found)) == 10


def test_a_comparison_is_decided_in_either_direction() -> None:
    every = attempts(20, ("a", "b"))
    better = [one.model == "a" for one in every]
    assert (
        StoppingCriterion.parse("decided", 2).find_reason(every, rows(every, better)) == "a is better than b (20 : 0)"
    )
    worse = [one.model == "b" for one in every]
    assert StoppingCriterion.parse("decided", 2).find_reason(every, rows(every, worse)) == "a is worse than b (0 : 20)"
    same = [at % 4 < 2 for at in range(len(every))]
    assert not StoppingCriterion.parse("decided", 2).find_reason(every, rows(every, same))


def test_equal_models_are_seldom_told_apart_however_often_one_looks() -> None:
    chance, fooled = random.Random(7), 0
    for _ in range(1_000):
        wins = losses = 0
        for _ in range(200):
            wins, losses = (wins + 1, losses) if chance.random() < 0.5 else (wins, losses + 1)
            if compute_odds(wins, losses) >= ODDS:
                fooled += 1
                break
    assert fooled <= 50


def test_each_pair_of_attempts_is_one_unchangeable_bet() -> None:
    """Majorities of instances would change with further attempts, and their odds would not be those of bets."""
    every = attempts(4, ("a", "b"), times=5)
    until = StoppingCriterion.parse("decided", 2)
    better = [one.model == "a" for one in every]
    assert until.find_reason(every, rows(every, better)) == "a is better than b (20 : 0)"
    known = rows(every[:38], better[:38]) | rows(every[38:], [False, True])
    assert until.find_reason(every, known) == "a is better than b (19 : 1)"


def test_a_comparison_that_was_decided_long_ago_stays_so() -> None:
    """A third model that is as good as the first keeps an evaluation running, whatever the second one loses by."""
    assert compute_odds(2_000, 0) > ODDS
    assert compute_odds(10, 3_000) > ODDS


@pytest.mark.parametrize(
    ("text", "instances", "number", "why"),
    [
        ("ci=3%", 19, 5, "results of 20 instances are needed first, and there are 19"),
        ("ci=3%", 50, 1, "with 50 instances, the interval is never narrower than ±7.3%"),
        ("ci=3%", 124, 1, "never narrower than"),
        ("ci=3%", 126, 1, ""),
        ("ci=3%", 25, 10, ""),
        ("decided", 8, 1, "8 pairs of attempts are needed first, and there are 8"),
        ("decided", 9, 1, ""),
    ],
)
def test_criterion_that_can_never_act_says_why(text: str, instances: int, number: int, why: str) -> None:
    found = StoppingCriterion.parse(text, 2).find_obstacle(instances, number)
    assert (why in found) if why else not found
    if not why and text != "decided" and number == 1:
        every = attempts(instances)
        assert StoppingCriterion.parse(text, 1).find_reason(every, rows(every[:-1], [True] * (instances - 1)))
