"""The page about the command line: it names every verb and every option of the two that begin conversations."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from deckhands.cli.command_group import find_commands
from deckhands.cli.commands.run import run
from deckhands.cli.commands.submit import submit

PAGE = (Path(__file__).parents[4] / "docs" / "cli.md").read_text()


@pytest.mark.parametrize("verb", sorted(find_commands()))
def test_every_verb_is_on_the_page(verb: str) -> None:
    assert re.search(rf"`(deckhands )?{verb}\b", PAGE), verb


@pytest.mark.parametrize("verb", [run, submit], ids=["run", "submit"])
def test_every_option_is_on_the_page(verb: click.Command) -> None:
    options = [option for option in verb.params if isinstance(option, click.Option)]
    unnamed = [names for names in (option.opts for option in options) if not any(is_named(name) for name in names)]
    assert unnamed == []


def is_named(option: str) -> bool:
    return re.search(rf"`{option}\b", PAGE) is not None
