"""Answers at a terminal to what an MCP server asks."""

import os

import pytest

from broker.contract.actions import MCPAction
from broker.contract.observations import ServerQuestion
from deckhands.cli.commands import confirming

FORM = {"type": "object", "properties": {"size": {"type": "number"}, "code": {"type": "string"}}}
FORMS = (ServerQuestion(key="a", message="Which?", fields=FORM),)
VISIT = (ServerQuestion(key="b", message="Log in", url="https://login.test/x"),)


@pytest.mark.parametrize(
    ("questions", "typed", "answer"),
    [
        (FORMS, "y\n3\n007\n", {"size": 3, "code": "007"}),
        (FORMS, "y\n\n\n", {}),
        (FORMS, "n\n", False),
        (VISIT, "yes\n", {}),
        (VISIT, "\n", False),
    ],
)
async def test_fields_of_a_server_are_read_line_by_line(
    questions: tuple[ServerQuestion, ...],
    typed: str,
    answer: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reader, writer = os.pipe()
    os.write(writer, typed.encode())
    os.close(writer)
    action = MCPAction(id=9, name="ask", tool="remote/ask", asks=7, questions=questions)
    with os.fdopen(reader) as lines:
        monkeypatch.setattr("sys.stdin", lines)
        assert await confirming.ask_at_terminal(action) == answer
    assert f"remote: {questions[0].message}" in capsys.readouterr().err
