"""`deckhands eval`: from the command to the report, killed on the way."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from deckhands.evaluation.attempts.results import read_results
from deckhands.evaluation.directory import EvaluationRequest, record_request
from tests.integration.command_line import deckhands, environment, started
from tests.polling import until

SHIPPED = ("eval", "run", "shipped", "--model", "scripted", "-n", "4", "--filter", "easy")


def test_shipped_benchmark_is_solved_despite_a_killed_command(tmp_path: Path) -> None:
    env, out = environment(tmp_path / "home"), tmp_path / "out"
    results = out / "results.jsonl"
    with started(*SHIPPED, "--out", out, env=env) as running:
        asyncio.run(until(lambda: results.exists() and results.stat().st_size > 0, limit=60.0, what="result"))
        running.kill()
    seen = read_results(results)
    done = deckhands("eval", "attach", out, "-n", "8", "--json", env=env)
    assert done.code == 0, done
    (summary,) = done.json
    figures = summary["models"]["scripted"]
    assert figures["outcomes"]["resolved"] == figures["attempts"] == figures["instances"] > 10
    rows = read_results(results)
    assert rows[: len(seen)] == seen
    assert len({row.key for row in rows}) == len(rows) == figures["attempts"]
    assert json.loads((out / "summary.json").read_text()) == summary
    before = results.read_bytes()
    assert deckhands(*SHIPPED, "--out", out, env=env).code == 0  # nothing is left to do
    assert results.read_bytes() == before
    (out / "summary.json").unlink()
    report = deckhands("eval", "report", out, env=env)
    assert "pass@1 100.0%" in report.out
    assert json.loads((out / "summary.json").read_text()) == summary
    assert "<table>" in (out / "report.html").read_text()
    compared = deckhands("eval", "compare", out, out, env=env)
    assert "p = 1" in compared.out


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        (("--model", "a,a"), "a name twice"),
        (("--slice", "1-2"), "is not a slice"),
        (("--filter", "nothing-like-this"), "No instance is left"),
        (("--model", "scripted/nowhere.json"), "cannot be read"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_written(
    tmp_path: Path, changed: tuple[str, ...], error: str
) -> None:
    done = deckhands(
        "eval", "run", "shipped", "--model", "scripted", "--out", tmp_path / "out", *changed, env=environment(tmp_path)
    )
    assert done.code == 2
    assert error in done.err
    assert not (tmp_path / "out").exists()


def test_budget_without_a_known_price_is_refused_first(tmp_path: Path) -> None:
    env, out = environment(tmp_path / "home", LLM_MODEL="acme/first"), tmp_path / "out"
    budget = (
        "eval",
        "run",
        "shipped",
        "--model",
        "gpt-4o,acme/unknown",
        "--slice",
        ":1",
        "--budget",
        "1",
        "--out",
        out,
    )
    refused = deckhands(*budget, env=env)
    assert refused.code == 2, refused
    assert "The price of acme/unknown is unknown, so --budget cannot bind." in refused.err
    assert "input_cost_per_token" in refused.err
    assert "--token-budget" in refused.err
    assert not (out / "results.jsonl").read_text()


def test_another_evaluation_is_not_overwritten(tmp_path: Path) -> None:
    env, out = environment(tmp_path / "home"), tmp_path / "out"
    one = ("eval", "run", "shipped", "--model", "scripted", "--slice", ":1", "--out", out)
    assert deckhands(*one, env=env).code == 0
    done = deckhands(*one, "-k", "2", env=env)
    assert done.code == 2
    assert "has another evaluation" in done.err
    nowhere = deckhands("eval", "attach", tmp_path / "nowhere", env=env)
    assert (nowhere.code, "has no evaluation" in nowhere.err) == (2, True)


def test_run_killed_before_its_first_file_says_what_to_do(tmp_path: Path) -> None:
    env, out = environment(tmp_path / "home"), tmp_path / "out"
    out.mkdir()
    (out / ".evaluation.json.k1").write_text("{")  # what a command was writing when it was killed
    for command in (("attach", out), ("attach", tmp_path / "nowhere"), ("report", out), ("status", out)):
        done = deckhands("eval", *command, env=env)
        assert (done.code, "Traceback" in done.err) == (2, False), done
        assert "deckhands eval run" in done.err
    (out / "evaluation.json").write_text("{")
    damaged = deckhands("eval", "attach", out, env=env)
    assert (damaged.code, "evaluation.json cannot be read" in damaged.err, "remove it" in damaged.err) == (
        2,
        True,
        True,
    )


def test_a_run_killed_before_its_first_attempt_is_continued(tmp_path: Path) -> None:
    env, out = environment(tmp_path / "home"), tmp_path / "out"
    asked = record_request(out, EvaluationRequest(name="", dataset="shipped", models=("scripted",), part=":1"))
    for command in ("status", "pause", "report"):
        done = deckhands("eval", command, out, env=env)
        assert (done.code, "Traceback" in done.err) == (2, False), done
        assert ("has not started" in done.err) is (command != "report")
        assert "eval attach" in done.err
    attached = deckhands("eval", "attach", out, env=env)
    assert attached.code == 0, attached
    (row,) = read_results(out / "results.jsonl")
    assert row.outcome == "resolved"
    again = ("eval", "run", "shipped", "--model", "scripted", "--slice", ":1", "--out", out)
    assert deckhands(*again, env=env).code == 0
    assert read_results(out / "results.jsonl") == [row]  # the same evaluation, so nothing is left to do
    assert json.loads((out / "evaluation.json").read_text())["name"] == asked.name


def test_other_endings_of_an_attempt_are_scored_like_it(tmp_path: Path) -> None:
    env, out = environment(tmp_path / "home"), tmp_path / "out"
    one = ("eval", "run", "shipped", "--model", "scripted", "--slice", ":1", "--out", out, "--until", "")
    assert deckhands(*one, env=env).code == 0
    (row,) = read_results(out / "results.jsonl")
    status = deckhands("eval", "status", out, env=env)
    assert ("1 resolved" in status.out, status.err) == (True, "")  # it is over, so nothing is to be attached
    for name, said in ((row.instance, "Repaired."), (row.conversation_id, "Repaired."), (row.checked_id, "OK")):
        shown = deckhands("eval", "logs", out, name, env=env)
        assert (shown.code, said in shown.out) == (0, True), shown
    unknown = deckhands("eval", "logs", out, "no such", env=env)
    assert (unknown.code, "No attempt at 'no such'" in unknown.err) == (2, True)
    forked = tmp_path / "forked"
    done = deckhands(
        "eval", "fork", f"{row.conversation_id}@3", "--of", out, "-n", "2", "--out", forked, "--json", env=env
    )
    assert done.code == 0, done
    (found,) = done.json
    assert [one["resolved"] for one in found["models"].values()] == [2]
    assert {one.instance for one in read_results(forked / "results.jsonl")} == {row.instance}
    several = deckhands("eval", "logs", forked, row.instance, env=env)
    assert (several.code, "There are 2 attempts" in several.err) == (2, True)
    again = ("eval", "fork", "--of", out, "--out", tmp_path / "no")
    for point, error in (
        (f"{row.conversation_id}@1", "has no task up to the event 1"),
        (f"{row.conversation_id}@999", "there is no event 999"),
        (f"{row.checked_id}@3", "is no attempt of the evaluation"),
        ("nobody@3", "No conversation with the id"),
    ):
        refused = deckhands(*again, point, env=env)
        assert (refused.code, error in refused.err) == (2, True), refused
    assert not (tmp_path / "no").exists()
