"""Rows are written once and read again; the figures follow from them alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.runtime.errors import UsageError
from deckhands.evaluation.attempts.results import AttemptRow, Results, read_results
from deckhands.evaluation.attempts.statistics import (
    BINS,
    classify_failures,
    compare_runs,
    compute_distribution,
    compute_summary,
    compute_t_quantile,
    pass_at,
    wilson,
)
from deckhands.evaluation.attempts.status import SpendingMeter
from deckhands.evaluation.report import render_html
from tests.source_code import ROOT


def row(instance: str, outcome: str = "resolved", *, attempt: int = 1, **more: object) -> AttemptRow:
    return AttemptRow.model_validate(
        {"instance": instance, "model": "m", "attempt": attempt, "outcome": outcome, **more}
    )


def test_rows_are_reread_and_a_cut_line_dropped(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with Results(path) as results:
        results.add(row("a"))
        results.add(row("b", "unresolved"))
    with path.open("ab") as file:
        file.write(b'{"instance": "c", "mod')
    assert [one.instance for one in read_results(path)] == ["a", "b"]
    with Results(path) as results:
        assert set(results.rows) == {("m", "a", 1), ("m", "b", 1)}
        results.add(row("c"))
    assert [one.instance for one in read_results(path)] == ["a", "b", "c"]
    assert path.read_bytes().endswith(b"}\n")


def test_a_file_of_other_lines_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("notes\nmore\n")
    with pytest.raises(UsageError, match="is not a result"):
        Results(path)
    assert path.read_text() == "notes\nmore\n"


def test_pass_at_k_is_the_unbiased_estimator() -> None:
    assert pass_at(10, 3, 1) == pytest.approx(0.3)
    assert pass_at(10, 3, 5) == pytest.approx(1 - (7 * 6 * 5 * 4 * 3) / (10 * 9 * 8 * 7 * 6))
    assert pass_at(4, 0, 2) == 0.0
    assert pass_at(4, 3, 2) == 1.0


def test_the_interval_of_a_share_is_wilsons() -> None:
    assert wilson(8, 10) == pytest.approx((0.4901, 0.9433), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_abandoned_attempts_are_reported_and_not_scored() -> None:
    rows = [
        row("a", cost_usd=0.5, tags=["easy"], conversation_id="one", checked_id="its-check"),
        row("a", "infra-abandoned", attempt=2, cause="timeout", failures=["timeout"] * 4, tries=4),
        row("b", "unresolved", cost_usd=1.5, conversation_id="two", failures=["check_error"], checked_id="again"),
        row("b", attempt=2, failures=["rate_limit"], tries=2, conversation_id="three"),
        row("b", "not-run", attempt=3, cause="cancelled"),
    ]
    figures = compute_summary(rows)["models"]["m"]
    assert figures["pass@1"] == pytest.approx((1.0 + 0.5) / 2)
    assert figures["outcomes"] == {
        "resolved": 2,
        "unresolved": 1,
        "limit": 0,
        "refused": 0,
        "setup_failed": 0,
        "infra-abandoned": 1,
        "not-run": 1,
    }
    assert figures["cost_usd"]["total"] == 2.0
    assert (figures["conversations"], figures["infrastructure_failures"]) == (2 + 4 + 3 + 2, 6)
    assert figures["infrastructure_failures_per_1000"] == pytest.approx(6_000 / 11)
    assert figures["tags"] == {"easy": {"attempts": 1, "resolved": 1}}
    json.dumps(figures)


def test_attempts_without_set_up_give_no_score() -> None:
    rows = [row("a"), row("a", "setup_failed", attempt=2), row("b", "setup_failed", cause="exit_code_1")]
    figures = compute_summary(rows)["models"]["m"]
    assert (figures["pass@1"], figures["instances"], figures["outcomes"]["setup_failed"]) == (1.0, 2, 2)
    found = compare_runs(rows, [row("a"), row("b"), row("c", "setup_failed")])
    assert (found["instances"], found["setup_failed"]) == (1, ["b", "c"])


def test_two_runs_are_compared_by_mcnemars_exact_test() -> None:
    ours = [row(str(number)) for number in range(10)]
    theirs = [row(str(number), "resolved" if number < 2 else "unresolved") for number in range(12)]
    found = compare_runs(ours, theirs)
    assert (found["instances"], found["resolved"], len(found["only_first"])) == (10, [10, 2], 8)
    assert found["p_value"] == pytest.approx(2 / 2**8)
    assert compare_runs(ours, ours)["p_value"] == 1.0


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423), (120, 1.9799), (1_000, 1.9623)],
)
def test_quantile_of_t_is_that_of_published_tables(degrees: int, quantile: float) -> None:
    assert compute_t_quantile(degrees) == pytest.approx(quantile, abs=5e-5)
    assert compute_t_quantile(200) == pytest.approx(compute_t_quantile(201), abs=1e-4)


def test_few_instances_have_the_interval_of_t() -> None:
    rows = [row(f"i{at}", "resolved" if at else "unresolved", attempt=n) for at in range(5) for n in (1, 2)]
    low, high = compute_summary(rows)["models"]["m"]["pass@1_interval"]
    assert (0.8 - low, high) == (pytest.approx(0.555, abs=1e-3), 1.0)


@pytest.mark.parametrize(
    "rows",
    [
        [row("a"), row("a", "unresolved", attempt=2)],
        [row("a", attempt=1), row("a", attempt=2), row("b", "unresolved"), row("b", "unresolved", attempt=2)],
        [row("a", "infra-abandoned")],
    ],
)
def test_interval_of_every_value_is_none(rows: list[AttemptRow]) -> None:
    assert compute_summary(rows)["models"]["m"]["pass@1_interval"] is None
    assert "no interval: too few instances" in render_html("Few", rows)


def test_comparison_names_difference_interval_and_instances() -> None:
    ours = [row(str(number)) for number in range(10)]
    theirs = [row(str(number), "resolved" if number < 7 else "unresolved") for number in range(10)]
    found = compare_runs(ours, theirs)
    assert found["difference"] == pytest.approx(0.3)
    # Bonett and Price: (3 + 1 - 1) / 12 is the middle
    assert sum(found["interval"]) / 2 == pytest.approx(3 / 12)
    assert found["interval"][0] < 0 < 0.3 < found["interval"][1]
    assert [one["instance"] for one in found["differing"]] == ["7", "8", "9"]
    assert found["differing"][0] == {"instance": "7", "first": 1.0, "second": 0.0}


def test_shares_of_attempts_are_compared_in_pairs() -> None:
    ours = [row(name, attempt=n) for name in "abc" for n in (1, 2)]
    theirs = [
        row(name, "resolved" if n == 1 or name == "a" else "unresolved", attempt=n) for name in "abc" for n in (1, 2)
    ]
    found = compare_runs(ours, theirs)
    assert found["difference"] == pytest.approx(1 / 3)
    half = 4.3027 * (1 / 12) ** 0.5 / 3**0.5
    assert found["interval"] == pytest.approx([1 / 3 - half, min(1.0, 1 / 3 + half)], abs=1e-3)


def test_runs_without_common_instances_have_no_figures() -> None:
    found = compare_runs([row("a")], [row("b"), row("a", "infra-abandoned")])
    assert (found["instances"], found["p_value"], found["difference"], found["interval"]) == (0, None, None, None)


def test_the_page_shows_text_of_agents_as_text() -> None:
    hostile = "<script>alert(1)</script>"
    page = render_html(hostile, [row("a", "unresolved", evidence=hostile, patch=hostile, cause=hostile, seconds=3.0)])
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 4


def test_distributions_share_bins_and_omit_unrun_attempts() -> None:
    rows = [row(f"i{number}", cost_usd=number) for number in range(11)]
    rows += [row("other", cost_usd=2.5, model="n"), row("left", "not-run", cost_usd=99.0)]
    found = compute_distribution(rows, lambda one: one.cost_usd)
    assert (found.most, len(found.counts["m"]), sum(found.counts["m"])) == (10.0, BINS, 11)
    assert [at for at, count in enumerate(found.counts["m"]) if count] == [*range(0, 20, 2), 19]
    assert found.counts["n"].index(1) == 5
    assert compute_distribution([row("a")], lambda one: one.seconds).counts == {"m": [1, *[0] * (BINS - 1)]}
    assert compute_distribution([], lambda one: one.seconds).counts == {}


def test_failures_are_counted_by_end_most_frequent_first() -> None:
    rows = [row("a"), row("b", "limit", cause="max_iterations"), row("c", "unresolved"), row("d", "unresolved")]
    rows += [row("b", "limit", cause="max_iterations", model="n"), row("e", "limit", cause="max_budget")]
    found = [(one.outcome, one.cause, one.attempts) for one in classify_failures(rows)]
    assert found == [
        ("limit", "max_iterations", {"m": 1, "n": 1}),
        ("unresolved", "", {"m": 2}),
        ("limit", "max_budget", {"m": 1}),
    ]


def test_every_cost_is_counted_once_and_named() -> None:
    rows = [
        row("a", cost_usd=1.0, critic_cost_usd=0.25, critic_id="c", score=7.0, verdict="<b>Fine.</b>"),
        row("b", "unresolved", cost_usd=0.5, lost_cost_usd=0.125),
        row("c", "infra-abandoned", cost_usd=0.5, critic_cost_usd=0.25, lost_cost_usd=0.5),
        row("d", "not-run", cost_usd=0.25, cause="cancelled"),
    ]
    figures = compute_summary(rows)["models"]["m"]
    assert figures["cost_usd"] == {"total": 2.25, "median": 0.5, "p90": 1.0, "most": 1.0}
    assert (figures["critic_cost_usd"], figures["lost_cost_usd"]) == (0.5, 0.625)
    assert SpendingMeter(rows).cost_usd == 3.375
    page = render_html("Costs", rows)
    assert "Cost: $2.2500; critics: $0.5000; tries that failed: $0.6250" in page
    assert "The critic gave 7 of 10 and cost $0.2500: &lt;b&gt;Fine.&lt;/b&gt;" in page
    assert "critics" not in render_html("None", [row("a", cost_usd=1.0)])


def test_the_page_says_how_attempts_failed() -> None:
    page = render_html("Failures", [row("a"), row("b", "limit", cause="max_<iterations>")])
    assert "<td>limit: max_&lt;iterations&gt;<td>1" in page


def test_cost_of_replaced_rows_counts_for_a_budget(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with Results(path) as results:
        results.add(row("a", cost_usd=1.0, critic_cost_usd=0.5))
        results.add(row("a", cost_usd=0.25, round=1))
        results.add(row("b", cost_usd=0.25))
        assert results.replaced_cost_usd == 1.5
    with Results(path) as results:
        assert results.replaced_cost_usd == 1.5
        assert SpendingMeter(results.rows.values(), cost_usd=results.replaced_cost_usd).cost_usd == 2.0


def test_shares_that_are_all_the_same_have_an_interval() -> None:
    rows = [row(f"i{number}", attempt=attempt) for number in range(10) for attempt in (1, 2)]
    assert compute_summary(rows)["models"]["m"]["pass@1_interval"] == pytest.approx(list(wilson(10, 10)))


FULL = """
import resource, sys
from pathlib import Path
from broker.runtime.errors import UsageError
from deckhands.evaluation.attempts.results import AttemptRow, Results, read_results
path = Path(sys.argv[1])
row = AttemptRow(instance="a", model="m", attempt=1, outcome="resolved")
with Results(path) as results:
    results.add(row)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, resource.RLIM_INFINITY))
    try:
        results.add_all([row.model_copy(update={"instance": name, "patch": "x" * 3_000}) for name in "bc"])
    except UsageError as error:
        print(error.message)
    print(path.read_bytes().count(b"\\n"), [one.instance for one in results.rows.values()])
print([one.instance for one in read_results(path)])
"""


def test_rows_that_find_no_room_leave_the_others_whole(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    command = (sys.executable, "-c", FULL, str(path))
    done = subprocess.run(command, env=dict(os.environ), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"{path} cannot be written: File too large.", "1 ['a']", "['a']"], done.stderr


def test_the_page_shows_models_side_by_side_with_reasons() -> None:
    rows = [
        row("a", tags=["easy"], reward=1.0),
        row("a", "unresolved", model="n", evidence='1 test failed\nAssertionError: 3\n{"reward": 0.5}', reward=0.5),
        row("b", "limit", model="n", cause="iterations", metrics={"speed": 2.0}, step_rewards=[0.0, 0.5]),
    ]
    page = render_html("Two", rows, {"dataset": "rows<1>.jsonl", "critic": "", "models": ("m", "n")})
    assert "<h2>Models side by side</h2><table><tr><th><th>m<th>n<tr><td>pass@1<td>100.0%<td>0.0%" in page
    assert '<a href="#a1" style="color:#c05621">unresolved (0.5)</a>' in page
    assert "<td>0.5<td>AssertionError: 3<td>" in page
    assert "It reached the limit: iterations." in page
    assert "<tr><td>dataset<td>rows&lt;1&gt;.jsonl<tr><td>models<td>m, n" in page
    assert "body:has(#f-o1:not(:checked)) #attempts tr[id].o1{display:none}" in page
    assert "body:has(#f-t0:checked) #attempts tr[id]:not(.t0){display:none}" in page
    assert "Rewards of steps: 0, 0.5" in page
