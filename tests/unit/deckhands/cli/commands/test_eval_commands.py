"""deckhands eval: refused option values, and figures computed from the rows of a directory."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from broker.runtime.errors import UsageError
from deckhands.cli.commands.eval import eval_
from deckhands.cli.commands.eval_export import write_predictions
from deckhands.evaluation.attempts.results import AttemptRow, Results
from deckhands.evaluation.directory import EvaluationRequest, record_request
from tests.dataset_parts import harbor_task

SHIPPED = ("run", "shipped", "--model", "scripted", "--slice", ":1")
FORK = ("fork", "some@3", "--model", "m")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((*SHIPPED, "--budget", "nan"), "nan is not a finite number"),
        ((*SHIPPED, "--budget", "-1"), "is not in the range"),
        ((*SHIPPED, "--max-budget", "nan"), "nan is not a finite number"),
        ((*SHIPPED, "--max-budget", "inf"), "Leave the option out"),
        ((*SHIPPED, "--max-seconds", "inf"), "Leave the option out"),
        ((*SHIPPED, "--max-seconds", "0"), "is not in the range"),
        ((*SHIPPED, "-n", "0"), "neither `auto` nor a number from 1 to 10,000"),
        ((*SHIPPED, "-n", "many"), "neither `auto` nor a number"),
        ((*SHIPPED, "-k", "0"), "is not in the range"),
        *(
            ((*SHIPPED, "--until", text), "is not a criterion")
            for text in (" ", "ci", "ci=0", "ci=nan", "ci=60%", "soon", "ci=3%;rm")
        ),
        ((*SHIPPED, "--until", "decided"), "there is one"),
        ((*SHIPPED, "--redo", ""), "neither an outcome nor an instance"),
        ((*SHIPPED, "--filter", "("), "no regular expression"),
        ((*SHIPPED, "--model", ""), "an empty name"),
        ((*SHIPPED, "--scorer", "scorers.py"), "is not a scorer"),
        ((*SHIPPED, "--scorer", "none.py@f"), "There is no Python file"),
        (("run", "", "--model", "scripted"), "has no name"),
        ((*FORK, "--check", " "), "The check is empty"),
        (FORK, "how siblings are scored"),
        ((*FORK, "--of", "DIR", "--check", "true"), "how siblings are scored"),
        ((*FORK, "--of", "DIR", "--hidden", "."), "has no effect without --check"),
        ((*FORK, "--critic", "c", "--hidden", "."), "has no effect without --check"),
        ((*FORK, "--critic", "c", "--of", "DIR", "--check", "true"), "how siblings are scored"),
        ((*FORK, "--check", "true", "--tenant", "a b"), "is not a name"),
        ((*FORK, "--of", "nowhere"), "has no evaluation"),
        (("fork", "some@x", "--model", "m", "--check", "true"), "is not an event"),
        (("fork", "some@0", "--model", "m", "--check", "true"), "is not an event"),
        (("fork", "some@3", "--model", "m,m", "--check", "true"), "a name twice"),
        ((*FORK, "--check", "true", "-n", "0"), "is not in the range"),
    ],
)
def test_invalid_option_values_are_refused(tmp_path: Path, arguments: tuple[str, ...], error: str) -> None:
    out = tmp_path / "out"
    with pytest.raises((UsageError, click.UsageError)) as raised:
        eval_.main([*arguments, "--out", str(out)], standalone_mode=False)
    assert error in f"{raised.value} {getattr(raised.value, 'message', '')}"
    assert not out.exists()


def test_unsupported_parts_are_named_before_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = harbor_task(tmp_path / "hello")
    arguments = ["run", str(folder), "--model", "scripted", "--until", "decided", "--out", str(tmp_path / "out")]
    with pytest.raises(UsageError, match="there is one"):
        eval_.main(arguments, standalone_mode=False)
    assert "hello: FROM debian:13 is ignored: the programs are those of the node" in capsys.readouterr().err


def test_criterion_that_can_never_act_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SHIPPED, "--until", "ci=3%", "--redo", "unknown", "--out", str(tmp_path / "out")]
    with pytest.raises(UsageError, match="neither an outcome nor an instance"):
        eval_.main(arguments, standalone_mode=False)
    assert "--until ci=3% can never stop this evaluation early: results of 20" in capsys.readouterr().err


def results(directory: Path, **outcomes: str) -> Path:
    """Write rows: by the model, a letter for each instance, `r` for one that is resolved."""
    directory.mkdir()
    with Results(directory / "results.jsonl") as found:
        for model, letters in outcomes.items():
            for number, letter in enumerate(letters):
                outcome = {"r": "resolved", "x": "infra-abandoned"}.get(letter, "unresolved")
                row = {"instance": f"i{number}", "model": model, "attempt": 1, "outcome": outcome}
                found.add(
                    AttemptRow.model_validate(row | {"critic_cost_usd": 0.25, "critic_id": "c", "patch": f"{model}\n"})
                )
    return directory


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    eval_.main([*map(str, arguments)], standalone_mode=False)
    found = capsys.readouterr()
    return found.out, found.err


def test_models_of_two_evaluations_are_compared_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = results(tmp_path / "one", a="rrrr", b="uuuu"), results(tmp_path / "two", a="rruu", b="uuuu")
    out, err = said(capsys, "compare", one, two)
    assert "the attempts of all models count together" in err
    out, err = said(capsys, "compare", one, two, "--model", "a")
    assert (err, "4 and 2 resolved; 2 only by the first, 0 only by the second" in out) == ("", True)
    out, err = said(capsys, "compare", one, one, "--model", "b,a", "--json")
    assert json.loads(out)["resolved"] == [0, 4]
    for wrong in ("c", "a,c", "a,a,a", ""):
        with pytest.raises((UsageError, click.UsageError), match="--model"):
            said(capsys, "compare", one, two, "--model", wrong)


def test_a_report_of_siblings_compares_them_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = results(tmp_path / "one", a="ur", b="uu")
    record_request(directory, EvaluationRequest(name="", dataset="", models=("a", "b"), origin="some@3", critic="c"))
    out, _ = said(capsys, "report", directory)
    assert "a and b: p = 1" in out
    assert "The critic cost $1.0000." in out
    assert "The best is" in out
    assert (directory / "best.patch").read_text() == "a\n"
    out, _ = said(capsys, "report", directory, "--json")
    assert json.loads(out)["siblings"]["critic_cost_usd"] == 1.0


def test_models_with_similar_names_have_separate_files(tmp_path: Path) -> None:
    names = ["x/y", "x_y", f"scripted/{'a' * 100}.json", f"scripted/b{'a' * 100}.json"]
    rows = [AttemptRow(instance="i", model=name, attempt=1, outcome="resolved", patch=f"{name}\n") for name in names]
    written, _ = write_predictions(rows, tmp_path)
    assert len(set(written)) == 4
    found = [json.loads(path.read_text()) for path in written]
    assert [one["model_name_or_path"] for one in found] == names
    (only,), _ = write_predictions(rows[:1], tmp_path)
    assert only.name == "predictions.jsonl"


def test_comparison_lists_the_instances_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = results(tmp_path / "one", a="rrrru"), results(tmp_path / "two", a="rruuu")
    out, _ = said(capsys, "compare", one, two)
    assert "The first resolves +40.0% (95 %: " in out
    assert out.endswith("  i2: 100% and 0%\n  i3: 100% and 0%\n")
    assert "No instance differs." in said(capsys, "compare", one, one)[0]


def test_comparison_without_common_instances_says_so(tmp_path: Path) -> None:
    one, two = results(tmp_path / "one", a="r"), results(tmp_path / "two", a="")
    with pytest.raises(UsageError, match="have no scored instance in common"):
        eval_.main(["compare", str(one), str(two)], standalone_mode=False)


def test_siblings_that_are_not_scored_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = results(tmp_path / "one", a="r", b="x")
    record_request(directory, EvaluationRequest(name="", dataset="", models=("a", "b"), origin="some@3", critic="c"))
    assert "a and b: nothing to compare" in said(capsys, "report", directory)[0]
