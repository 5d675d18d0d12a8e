"""What the workspace host is asked to do for a command."""

from __future__ import annotations

import pytest

from broker.contract.actions import CmdRunAction
from broker.contract.observations import ErrorObservation
from tool_worker.tools.bash import RunCommand
from tool_worker.tools.tool import HostRequest


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
    assert isinstance(request, HostRequest)
    assert request.tool == "bash"
    assert {name: request.arguments[name] for name in expected} == expected


def test_several_commands_are_refused_and_listed() -> None:
    refused = RunCommand().request(CmdRunAction(command="cd /\nls && pwd\ncat <<E\na\nb\nE"))
    assert isinstance(refused, ErrorObservation)
    assert refused.content == (
        "ERROR: Cannot execute multiple commands at once.\n"
        "Please run each command separately OR chain them into a single command via && or ;\n"
        "Provided commands:\n(1) cd /\n(2) ls && pwd\n(3) cat <<E\na\nb\nE"
    )
