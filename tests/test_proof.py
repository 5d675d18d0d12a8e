"""The figures page shows what was measured, and nothing else."""

import json
from pathlib import Path

from tests import proof as page
from tests.proof import END, PAGE, README, SECTIONS, START, Proof, Record, load_results, render_page, render_readme

SOME = {
    "date": "2026-01-01",
    "machine": "2 cores",
    "seconds": 3,
    "ended": "failed",
    "tests": {"passed": 1, "failed": 1, "skipped": 0},
    "records": [{"name": "kills", "trials": 600, "failures": 2, "unit": "kills", "seed": 7, "figures": {"p99": "2 s"}}],
}


def test_pages_are_those_of_the_kept_results() -> None:
    """If this fails: `.venv/bin/python -m tests.proof --render`. A new section has to be run once."""
    results = load_results()
    assert results.keys() == {section.name for section in SECTIONS}
    assert PAGE.read_text(encoding="utf-8") == render_page(results)
    readme = README.read_text(encoding="utf-8")
    assert readme == render_readme(readme, results)


def test_failed_suite_is_shown_as_failed() -> None:
    text = render_page({SECTIONS[0].name: SOME})
    assert "failed in 3 s" in text
    assert "| kills | 600 kills | 2 | - | 7 |" in text
    assert "| kills: p99 | 2 s |" in text
    assert SECTIONS[1].title not in text
    assert "2 failures" in render_readme(f"{START}{END}", {SECTIONS[0].name: SOME})


def test_runs_that_draw_their_trials_anew_are_added_up() -> None:
    first, other = (next(each for each in SECTIONS if each.is_added_up is is_added_up) for is_added_up in (True, False))
    later = {**SOME, "earlier": [page.shorten(SOME), page.shorten({**SOME, "date": "2026-01-02"})]}
    text = render_page({first.name: later, other.name: SOME})
    assert text.count("**All ") == 1
    assert "**All 3 runs** since 2026-01-01: 1,800 kills, 6 failures." in text
    assert "| **1,800 kills** | 6 failures" in render_readme(f"{START}{END}", {first.name: later})
    assert "| **600 kills** | 2 failures" in render_readme(f"{START}{END}", {other.name: later})


def test_bound_is_three_in_n() -> None:
    assert Record("kills", 600).bound == "< 0.005"
    assert Record("kills", 600, failures=1).bound == "-"
    assert Record("planted bugs", 20, is_drawn=False).bound == "-"


def test_record_is_handed_in_only_to_make_proof(tmp_path: Path) -> None:
    Proof(None, "test").record("some kills", trials=3)
    Proof(tmp_path, "test").record("some kills", trials=3, seed=1)
    (file,) = tmp_path.iterdir()
    assert Record(**json.loads(file.read_text())) == Record("some kills", 3, seed=1, test="test")


def test_section_keeps_what_its_tests_handed_in() -> None:
    here = "tests/test_proof.py"
    result = page.run_section(page.Section("own", "", "", "", ["pytest", here, "-k", "handed_in_by_a_test"]), 120.0)
    assert (result["ended"], result["tests"]) == ("passed", {"passed": 1, "failed": 0, "skipped": 0})
    assert [record["name"] for record in result["records"]] == ["a result"]


def test_result_handed_in_by_a_test(proof: Proof) -> None:
    proof.record("a result", trials=1)
