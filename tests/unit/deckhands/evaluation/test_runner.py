"""The summary that ends an evaluation's command."""

from __future__ import annotations

import pytest

from deckhands.evaluation.attempts.results import AttemptRow, Outcome
from deckhands.evaluation.attempts.statistics import compute_summary
from deckhands.evaluation.runner import print_summary


@pytest.mark.parametrize(
    ("outcome", "score"),
    [
        ("infra-abandoned", "no score"),
        ("not-run", "no score"),
        ("unresolved", "pass@1 0.0% (0.0% to 79.3%)"),
        ("limit", "pass@1 0.0% (0.0% to 79.3%)"),
    ],
)
def test_attempts_that_do_not_count_have_no_score(
    outcome: Outcome, score: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = AttemptRow(instance="a", model="m", attempt=1, outcome=outcome)
    print_summary(compute_summary([row]), as_json=False)
    assert f"1 {outcome}; {score}, $0.0000" in capsys.readouterr().out
