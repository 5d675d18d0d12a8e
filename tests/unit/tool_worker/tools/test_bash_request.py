"""What the workspace host is asked to do for a command."""

from __future__ import annotations

import pytest

from broker.contract.actions import CmdRunAction
from tool_worker.tools.bash import RunCommand


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (CmdRunAction(command=" ls "), {"command": "ls", "timeout": 120.0, "blocking": False, "is_static": False}),
        (CmdRunAction(command="ls", timeout=5.0, blocking=True), {"timeout": 5.0, "blocking": True}),
        (CmdRunAction(command="git status", is_static=True, cwd="/x"), {"is_static": True, "cwd": "/x"}),
        (CmdRunAction(command="C-c", is_input=True), {"command": "C-c", "is_input": True}),
        (CmdRunAction(command="yes\nno", is_input=True), {"command": "yes\nno", "is_input": True}),
        (CmdRunAction(command="  if x:\n", is_input=True), {"command": "  if x:\n", "is_input": True}),
        (CmdRunAction(command="\n", is_input=True), {"command": "\n", "is_input": True}),
    ],
)
def test_every_field_of_the_action_reaches_the_shell(action: CmdRunAction, expected: dict[str, object]) -> None:
    request = RunCommand().request(action)
    assert request.tool == "bash"
    assert {name: request.arguments[name] for name in expected} == expected
