"""Shells that a command has made unable to take commands, or to report an end: noticed, reported and replaced."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.integration.workspace_hosts import Terminal
from tool_worker.workspace.workspaces import Workspaces

SILENCED = [
    "builtin() { :; }",
    "builtin() { sleep 1000; }",
    "readonly -f builtin 2>/dev/null; builtin() { while :; do :; done; }; readonly -f builtin",
    "shopt -s extdebug; trap 'return 2' DEBUG",
    "PROMPT_COMMAND='cat'",
    "PS1='$(cat)'",
    "trap 'read line' DEBUG",
    "enable -n printf exit",
]
LET_THROUGH = [
    "exec </dev/null; sleep 8",
    "exec 3<&0 <&-; sleep 8",
    "trap 'sleep 1' DEBUG; for n in 1 2 3 4 5 6; do :; done",
]


async def test_a_shell_that_no_longer_tells_of_ends_is_replaced(workspaces: Workspaces) -> None:
    async def silence(number: int, command: str) -> None:
        run = Terminal(await workspaces.open(f"conversation-{number}"))
        answer = await run(f"mkdir inner; cd inner; {command}", blocking=True, timeout=60)
        directory = answer.fields["working_dir"]
        assert answer.state == "completed", command
        assert answer.suffix.startswith("\n[The shell stopped responding and was killed. "), command
        assert "How this command ended is unknown. The next command gets a new shell in " in answer.suffix
        assert answer.exit_code == 137
        assert (await run("pwd; false")).content == directory, command
        assert (await run("echo $?")).content == "1", command

    async def let_through(number: int, command: str) -> None:
        run = Terminal(await workspaces.open(f"patient-{number}"))
        answer = await run(f"x=1; {command}", blocking=True, timeout=60)
        assert (answer.state, answer.exit_code) == ("completed", 0), command
        assert (await run("trap - DEBUG; echo $x")).content == "1", command

    async with asyncio.TaskGroup() as group:
        for number, command in enumerate(SILENCED):
            group.create_task(silence(number, command))
        for number, command in enumerate(LET_THROUGH):
            group.create_task(let_through(number, command))


async def test_shell_found_deaf_after_its_answer_is_reported_next(run: Terminal) -> None:
    assert (await run("builtin() { cat; }", no_change_timeout=0.2)).state == "no_change_timeout"
    answer = await run("", blocking=True, timeout=60)
    assert answer.suffix.startswith("\n[The shell stopped responding and was killed. ")
    assert (await run("echo new")).content == "new"


@pytest.mark.parametrize("command", ["set +o emacs", "exec 10>&- 11>&- 12>&-"])
async def test_shell_reading_commands_elsewhere_is_replaced_at_once(run: Terminal, command: str) -> None:
    assert (await run(f"cd /usr; {command}")).exit_code == 0
    answer = await run("pwd")
    assert answer.content == "/usr"
    assert answer.prefix == "[The previous shell ended with exit code 137. This is a new one.]\n"


async def test_shell_that_cannot_report_a_start_runs_nothing_twice(run: Terminal, tmp_path: Path) -> None:
    await run("trap 'test -e armed && enable -n printf' DEBUG")
    (tmp_path / "node" / "conversation" / "workspace" / "armed").touch()
    answer = await run("echo run >> runs; cat runs")
    assert answer.content == "run"
    assert answer.prefix.startswith("[The previous shell ended with exit code ")


@pytest.mark.parametrize("stand_in", ["exit() { echo mine; }", "alias exit='echo mine'", "exit() { cat; }"])
async def test_a_stand_in_for_exit_keeps_no_command_from_running(run: Terminal, stand_in: str) -> None:
    await run(f"{stand_in}; false")
    assert (await run("echo $?; false", no_change_timeout=5)).content == "1"
    assert (await run("echo $?", no_change_timeout=5)).content == "1"
