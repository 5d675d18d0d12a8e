"""How many commands a text holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tool_worker.tools.shell_syntax import top_level_commands

ONE = [
    "a; b; c",
    "a && b || c",
    "a &\nb",
    "a;\nb",
    "a &&\nb",
    "a |\nb",
    "a \\\n b",
    "(a\nb)",
    "{ a\nb\n}",
    "for i in 1 2; do\n  a\n  b\ndone",
    "cat <<E\na; b\n& c\nE",
    "cat <<'E' > file\n$(a\nE",
    "if",
    "a 'b",
    "cat <<E; a\nb\nE",
]


@pytest.mark.parametrize("text", ONE)
def test_what_belongs_together_or_cannot_be_parsed_is_one(text: str) -> None:
    assert top_level_commands(text) == [text]


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("a\nb", ["a", "b"]),
        ("a\n\n\n  b  \n", ["a", "b"]),
        ("x=1\ny=2", ["x=1", "y=2"]),
        ("f() {\n  a\n}\nf", ["f() {\n  a\n}", "f"]),
        ("cat <<E\na\nE\nb", ["cat <<E\na\nE", "b"]),
        ("a # and b; c\nd", ["a", "d"]),
        ("a\n# b & c\nd", ["a", "d"]),
        ("# only a comment", []),
        ("", []),
    ],
)
def test_commands_on_lines_of_their_own_are_told_apart_whatever_comments_say(text: str, commands: list[str]) -> None:
    assert top_level_commands(text) == commands


@given(st.text("ab ;&|<>()'\"\\\n#$E=", max_size=40))
def test_any_text_is_taken_apart_into_pieces_of_itself(text: str) -> None:
    commands = top_level_commands(text)
    assert all(command in text for command in commands)
    assert sum(map(len, commands)) <= len(text)


def test_characters_beyond_ascii_are_parts_of_words_and_end_no_process() -> None:
    commands = ["echo {\U000def9f5", "cat gr\u00fcn\u00a0.txt", "ls \U0001f600"]
    assert top_level_commands("\n".join(commands)) == commands
