"""Input of `deckhands chat`: commands, messages and answers."""

from __future__ import annotations

import pytest

from broker.runtime.errors import UsageError
from deckhands.cli.tui.slash import SlashInput, parse_answer, parse_line


@pytest.mark.parametrize(
    ("line", "command", "text"),
    [
        ("fix the test", "", "fix the test"),
        ("/help", "help", ""),
        ("/MODEL gpt-9 ", "model", "gpt-9"),
        ("/?", "help", ""),
        ("/exit", "quit", ""),
        ("!ls -l", "exec", "ls -l"),
        ("/etc/hosts is wrong", "", "/etc/hosts is wrong"),
        ("  two\nlines ", "", "two\nlines"),
        ("", "", ""),
    ],
)
def test_a_line_is_a_command_or_a_message(line: str, command: str, text: str):
    assert parse_line(line) == SlashInput(command, text)


@pytest.mark.parametrize("line", ["/nonsense", "/", "/\x1b[2J"])
def test_an_unknown_command_is_refused_without_what_a_terminal_obeys(line: str):
    with pytest.raises(UsageError) as refused:
        parse_line(line)
    assert "\x1b" not in refused.value.message
    assert "/help" in refused.value.remedy


def test_an_answer_agrees_or_refuses_with_a_reason():
    assert parse_answer(" Y ") == parse_answer("yes") == (True, "")
    assert parse_answer("n") == parse_answer("NO") == (False, "")
    assert (
        parse_answer("n: too risky")
        == parse_answer("no, too risky")
        == parse_answer("too risky")
        == (False, "too risky")
    )
    with pytest.raises(UsageError):
        parse_answer(" ")
