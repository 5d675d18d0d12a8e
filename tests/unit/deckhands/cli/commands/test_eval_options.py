"""Values of options that `deckhands eval` refuses before anything is written or begun."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from broker.runtime.errors import UsageError
from deckhands.cli.commands.eval import eval_
from tests.dataset_parts import harbor_task

SHIPPED = ("run", "shipped", "--model", "scripted", "--slice", ":1")
FORK = ("fork", "some@3", "--model", "m")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((*SHIPPED, "--budget", "nan"), "nan cannot be used"),
        ((*SHIPPED, "--budget", "-1"), "is not in the range"),
        ((*SHIPPED, "--max-budget", "nan"), "nan cannot be used"),
        ((*SHIPPED, "--max-budget", "inf"), "Leave the option out"),
        ((*SHIPPED, "--max-seconds", "inf"), "Leave the option out"),
        ((*SHIPPED, "--max-seconds", "0"), "is not in the range"),
        ((*SHIPPED, "-n", "0"), "neither `auto` nor a number from 1 to 10,000"),
        ((*SHIPPED, "-n", "many"), "neither `auto` nor a number"),
        ((*SHIPPED, "-k", "0"), "is not in the range"),
        ((*SHIPPED, "--until", "ci=0"), "is not a criterion"),
        ((*SHIPPED, "--until", "ci=nan"), "is not a criterion"),
        ((*SHIPPED, "--until", " "), "is not a criterion"),
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
        ((*FORK, "--of", "DIR", "--hidden", "."), "belongs to --check"),
        ((*FORK, "--critic", "c", "--hidden", "."), "belongs to --check"),
        ((*FORK, "--critic", "c", "--of", "DIR", "--check", "true"), "how siblings are scored"),
        ((*FORK, "--check", "true", "--tenant", "a b"), "is not a name"),
        ((*FORK, "--of", "nowhere"), "has no evaluation"),
        (("fork", "some@x", "--model", "m", "--check", "true"), "is not an event"),
        (("fork", "some@0", "--model", "m", "--check", "true"), "is not an event"),
        (("fork", "some@3", "--model", "m,m", "--check", "true"), "a name twice"),
        ((*FORK, "--check", "true", "-n", "0"), "is not in the range"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, arguments: tuple[str, ...], error: str) -> None:
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


@pytest.mark.parametrize(("value", "error"), [("nan", "nan cannot be used"), ("-1", "is not in the range")])
def test_a_budget_is_retuned_to_a_number(value: str, error: str) -> None:
    with pytest.raises(click.UsageError, match=error):
        eval_.main(["retune", "some", "--budget", value], standalone_mode=False)


def test_criterion_that_can_never_act_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SHIPPED, "--until", "ci=3%", "--redo", "unknown", "--out", str(tmp_path / "out")]
    with pytest.raises(UsageError, match="neither an outcome nor an instance"):
        eval_.main(arguments, standalone_mode=False)
    assert "--until ci=3% can never stop this evaluation early: results of 20" in capsys.readouterr().err
