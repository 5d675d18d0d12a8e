"""Rewards: numbers of checks and scorers, which stay as they are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from broker.runtime.errors import UsageError
from deckhands.evaluation.attempts.results import AttemptRow
from deckhands.evaluation.attempts.statistics import compare_runs, compute_summary
from deckhands.evaluation.datasets.instances import Instance, ScorerFailed
from deckhands.evaluation.exports.dialogue import DialogueTurn
from deckhands.evaluation.rewards import Rewards, find_rewards, parse_rewards
from deckhands.evaluation.scorers import AttemptToScore, load_scorers, to_absolute_scorer

SCORERS = """
def lines(attempt):
    return attempt.patch.count("+")

async def walk(attempt):
    return {"reward": 0.25, "steps": [0, 0.25][: len(attempt.steps)], "metrics": {"files": len(attempt.files)}}

def broken(attempt):
    raise KeyError(attempt.task)

def wordy(attempt):
    return "good"

number = 3
"""


@pytest.mark.parametrize(
    ("value", "reward", "is_resolved"),
    [
        (True, 1.0, True),
        (0.5, 0.5, False),
        ({"reward": 2, "metrics": {"speed": 3}, "steps": [0, 1.5]}, 2.0, True),
        ({"reward": 0.9, "resolved": True}, 0.9, True),
        ({"metrics": {"speed": 3}}, None, False),
    ],
)
def test_a_reward_is_a_number_or_a_mapping(value: Any, reward: float | None, is_resolved: bool) -> None:
    found = parse_rewards(value)
    assert (found.reward, found.is_resolved) == (reward, is_resolved)
    assert parse_rewards(found) == found
    assert find_rewards(f"output\n{json.dumps({'reward': 0.5})}\n\n") == Rewards(0.5)


@pytest.mark.parametrize(
    "value",
    [
        "1",
        None,
        float("nan"),
        {"score": 1},
        {"reward": "1"},
        {"metrics": {"": 1}},
        {"metrics": [1]},
        {"steps": [float("inf")]},
        {"steps": "12"},
        {"resolved": 1},
    ],
)
def test_other_values_are_no_rewards(value: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_rewards(value)


@pytest.mark.parametrize(
    "output",
    ["", "passed", '{"reward": ', '{"reward": NaN}', f'{{"reward": 1{"0" * 400}}}', '{"reward": 1}\nmore', "[1]"],
)
def test_output_without_a_last_line_of_rewards_has_none(output: str) -> None:
    assert find_rewards(output) is None


def attempt() -> AttemptToScore:
    turns = (DialogueTurn("user", "Do it."), DialogueTurn("assistant", "Yes."), DialogueTurn("assistant", "Done."))
    files = {"a.txt": b"a"}
    return AttemptToScore(Instance("one", "Do it."), "m", 1, "Done.", "", None, "+a\n+b\n", files, turns)


def test_scorers_are_python_functions_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "scorers.py"
    path.write_text(SCORERS)
    found = load_scorers([to_absolute_scorer(f"{path}@{name}") for name in ("lines", "walk", "broken", "wordy")])
    lines, walk, broken, wordy = found
    assert asyncio.run(lines.score(attempt())) == Rewards(2.0, {"lines": 2.0})
    assert asyncio.run(walk.score(attempt())) == Rewards(0.25, {"files": 1.0, "walk": 0.25}, (0.0, 0.25))
    with pytest.raises(ScorerFailed, match=r"The scorer broken: KeyError: 'Do it\.'"):
        asyncio.run(broken.score(attempt()))
    with pytest.raises(ScorerFailed, match="str is neither a number nor a mapping"):
        asyncio.run(wordy.score(attempt()))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("scorers.py", "is not a scorer"),
        ("scorers.py@", "is not a scorer"),
        ("none.py@f", "There is no Python file"),
        ("scorers.py@none", "has no function 'none'"),
        ("scorers.py@number", "has no function 'number'"),
        ("wrong.py@f", "fails: ZeroDivisionError"),
    ],
)
def test_scorers_that_cannot_be_loaded_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    (tmp_path / "scorers.py").write_text(SCORERS)
    (tmp_path / "wrong.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=why):
        load_scorers([to_absolute_scorer(name)])


def row(instance: str, reward: float | None, *, outcome: str = "unresolved", **metrics: float) -> AttemptRow:
    fields = {"instance": instance, "model": "m", "attempt": 1, "outcome": outcome}
    return AttemptRow.model_validate(fields | {"reward": reward, "metrics": metrics})


def test_figures_have_the_means_of_rewards_and_metrics() -> None:
    rows = [row("a", 0.5, speed=2.0), row("b", 0.25, speed=4.0), row("c", None, outcome="limit")]
    figures = compute_summary([*rows, row("d", 9.0, outcome="infra-abandoned")])["models"]["m"]
    assert figures["reward"]["mean"] == pytest.approx(0.25)
    assert figures["metrics"]["speed"] == {
        "mean": 3.0,
        "interval": pytest.approx([-9.706, 15.706], abs=1e-3),
        "instances": 2,
    }
    assert figures["pass@1"] == 0.0
    assert "reward" not in compute_summary([row("a", None)])["models"]["m"]


def test_rewards_of_two_runs_are_compared_in_pairs() -> None:
    ours, theirs = [row("a", 0.5), row("b", 1.0, outcome="resolved")], [row("a", 0.25), row("b", None)]
    found = compare_runs(ours, theirs)
    assert found["reward"]["mean"] == pytest.approx((0.25 + 1.0) / 2)
    assert found["differing_rewards"][0] == {"instance": "a", "first": 0.5, "second": 0.25}
