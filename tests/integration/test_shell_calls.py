"""The shell as a model's calls meet it: scripts, long output, terminals and background jobs, through a real host."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from broker.contract.observations import ErrorObservation
from broker.contract.tool_arguments import ToolCallError
from tests.integration.model_hands import ModelHands
from tests.integration.workspace_hosts import opened, sleeping
from tests.polling import until
from tool_worker.workspace.workspaces import Workspaces

SANDBOXES = ["none", pytest.param("bwrap", marks=pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap"))]
WHOLE = re.compile(r"\[The whole output \((\d+) bytes\) is in (\S+); search it with grep, or view parts of it\.\]")


async def shown(hands: ModelHands, answer: Any, wanted: str, terminal: str = "job-1") -> Any:
    """Look at a terminal until it has shown a text; return the last answer."""
    seen = [answer.content]

    async def is_there() -> bool:
        nonlocal answer
        if wanted not in "\n".join(seen):
            answer = await hands.bash("", terminal=terminal)
            seen.append(answer.content)
        return wanted in "\n".join(seen)

    await until(is_there, limit=120)
    return answer


@pytest.fixture
async def hands(workspaces: Workspaces) -> ModelHands:
    return ModelHands(await workspaces.open("conversation"))


@pytest.mark.parametrize(
    ("script", "shown", "exit_code"),
    [
        ("mkdir a\ncd a\npwd | grep -o a$\n", "a", 0),
        ("echo one\nfalse", "one", 1),
        ("false\necho two", "two", 0),
        ("# why\nx=3\n\nfor i in 1 2; do\n  echo $i$x  # each\ndone\n", "13\n23", 0),
        ("cat > f <<'END'\na $b\n\nEND\ncat f\nwc -l < f", "a $b\n\n2", 0),
        ("f() {\n  return 4\n}\necho x \\\n  y\nf", "x y", 4),
        ("(exit 5) | cat\nif [ $? = 0 ]; then\n  echo yes\nelse\n  echo no\nfi", "yes", 0),
        ("read line <<< typed\necho $line\ncat < /dev/null\necho end", "typed\nend", 0),
    ],
)
async def test_several_commands_run_in_order_as_a_pasted_script(
    hands: ModelHands, script: str, shown: str, exit_code: int
) -> None:
    answer = await hands.bash(script)
    assert (answer.content, answer.exit_code) == (shown, exit_code)


async def test_lines_before_a_mistake_run_and_shell_continues(hands: ModelHands) -> None:
    answer = await hands.bash("echo before\nif then\necho behind")
    assert answer.content.startswith("before\nbash: ")
    assert "behind" not in answer.content
    assert answer.exit_code != 0
    assert (await hands.bash("echo next")).content == "next"


async def test_an_interrupt_ends_all_the_lines(hands: ModelHands) -> None:
    waiting = await hands.bash("echo first\nread x\necho third", timeout=0.5)
    assert (waiting.content, waiting.exit_code) == ("first", -1)
    ended = await hands.bash("C-c", is_input="true")
    assert (ended.content, ended.exit_code) == ("", 130)


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_long_output_is_kept_whole_in_a_searchable_file(sandbox: str, tmp_path: Path) -> None:
    async with opened(tmp_path / "node", sandbox=sandbox) as workspaces:
        hands = ModelHands(await workspaces.open("conversation"))
        answer = await hands.bash("seq 1 200000; printf 'a\\0b\\n'")
        assert "truncated" in answer.content
        size, path = WHOLE.search(answer.agent_text).groups()  # type: ignore[union-attr]
        assert int(size) == 1288895 + 4
        found = await hands("grep", pattern="^123456$|^a b$", path=path)
        assert found.content == f"{path}\n123456:123456\n200001:a b"
        assert "/workspace" not in path.replace(str(tmp_path), "")
        assert (await hands.bash(f"stat -c '%a %s' {path}")).content == f"600 {size}"
        short = await hands.bash("seq 1 100")
        assert "whole output" not in short.agent_text
        middle = await hands.bash("seq 1 8000")  # no host cuts it, but a prompt does
        assert WHOLE.search(middle.agent_text)


async def test_running_command_has_all_its_output_in_one_file(hands: ModelHands) -> None:
    begun = await hands.bash("seq 1 10000; read x; seq 1 10000; echo end", timeout=10)
    assert begun.exit_code == -1
    _, path = WHOLE.search(begun.agent_text).groups()  # type: ignore[union-attr]
    ended = await hands.bash("go", is_input="true")
    assert WHOLE.search(ended.agent_text)[2] == path  # type: ignore[index]
    assert (await hands.bash(f"grep -c . {path}")).content == "20001"


async def test_output_files_are_bounded_and_the_oldest_go_first(hands: ModelHands) -> None:
    paths = []
    for _ in range(5):
        answer = await hands.bash("head -c 20000000 /dev/zero | tr '\\0' x")
        told = r"\[The first 16777216 bytes of the output \(20000000 bytes\) is in (\S+);"
        paths.append(re.search(told, answer.agent_text)[1])  # type: ignore[index]
    listed = (await hands.bash(f"ls {Path(paths[0]).parent}")).content.split()
    assert listed == [Path(path).name for path in paths[1:]]


async def test_unwritable_folder_costs_the_file_not_the_command(hands: ModelHands) -> None:
    await hands.bash("ln -s /proc ${TMPDIR:-/tmp}/command-output")
    answer = await hands.bash("seq 1 200000")
    assert answer.exit_code == 0
    assert "bytes) is in" not in answer.agent_text


async def test_a_job_is_started_looked_at_answered_and_ends(hands: ModelHands) -> None:
    begun = await hands.bash("echo first; read x; echo got $x; read y; exit 3", is_background=True)
    assert begun.exit_code == -1
    await shown(hands, begun, "first")
    assert "[The command runs in the background." in begun.agent_text
    assert "[Terminal: job-1]" in begun.agent_text
    assert (await hands.bash("echo beside")).content == "beside"
    answered = await hands.bash("this", is_input="true", terminal="job-1")
    await shown(hands, answered, "got this")
    listed = await hands.bash("", control="list")
    assert re.fullmatch(r"main: waits for a command in \S+\njob-1: running for \d+ s: echo first; .*", listed.content)
    ended = await hands.bash("go", is_input="true", terminal="job-1", timeout=60)
    assert ended.exit_code == 3
    assert (await hands.bash("", control="list")).content.count("\n") == 0
    gone = await hands.bash("", terminal="job-1")
    assert gone.content.startswith("ERROR: There is no terminal `job-1`. Terminals and background jobs end with")


async def test_the_end_of_a_job_waits_until_somebody_looks(hands: ModelHands) -> None:
    await hands.bash("mkfifo gate")
    await hands.bash("read x < gate; seq 1 3", is_background=True)
    await hands.bash("echo go > gate")

    async def has_ended() -> bool:
        return "job-1: ended, and not looked at since" in (await hands.bash("", control="list")).content

    await until(has_ended)
    looked = await hands.bash("", terminal="job-1")
    assert looked.content == "1\n2\n3"
    assert "exit code 0" in looked.agent_text


async def test_a_job_that_fails_at_once_says_so_at_once(hands: ModelHands) -> None:
    answer = await hands.bash("no-such-program", is_background="true")
    answer = await shown(hands, answer, "command not found")
    assert answer.exit_code == 127
    assert (await hands.bash("", control="list")).content.startswith("main: ")


async def test_job_can_be_interrupted_and_killed_with_its_children(hands: ModelHands, tmp_path: Path) -> None:
    await hands.bash("sleep 1001", is_background=True)
    await hands.bash("sleep 1002 & setsid sleep 1003 & wait", is_background=True)
    ended = await hands.bash("C-c", is_input="true", terminal="job-1", timeout=60)
    assert ended.exit_code == 130
    killed = await hands.bash("", control="kill", terminal="job-2")
    assert killed.content == "The terminal `job-2` was killed, with what its command had started."
    await until(lambda: sleeping(tmp_path / "node", "conversation") == [])
    again = await hands.bash("", control="kill", terminal="job-2")
    assert again.content.startswith("There is no terminal `job-2`.")


async def test_a_terminal_is_a_shell_beside_the_others(hands: ModelHands) -> None:
    await hands.bash("mkdir inner; cd inner; x=main")
    assert (await hands.bash("x=second; basename $PWD", terminal="second")).content == "inner"
    assert (await hands.bash("echo $x", terminal="main")).content == "main"
    assert (await hands.bash("echo $x", terminal="second")).content == "second"
    waiting = await hands.bash("read y; echo $y", terminal="second", is_background=True)
    assert waiting.exit_code == -1
    assert (await hands.bash("echo $x")).content == "main"
    assert (await hands.bash("typed", is_input="true", terminal="second")).content == "typed"
    assert (await hands.bash("echo $x", terminal="second")).content == "second"


async def test_reset_replaces_a_hanging_shell_and_nothing_else(hands: ModelHands, tmp_path: Path) -> None:
    file = tmp_path / "node" / "conversation" / "workspace" / "file"
    await hands.edit("create", file, file_text="one\n")
    await hands.edit("str_replace", file, old_str="one", new_str="two")
    await hands.bash("y=kept", terminal="second")
    await hands.bash("f() { :; }; export x=1; cd /; sleep 1005 & trap '' INT; sleep 1004", timeout=1)
    for terminal in ({}, {"terminal": "main"}):
        reset = await hands("execute_bash", control="reset", **terminal)
        assert reset.content.startswith("The shell was killed. This is a new one in ")
        assert (await hands.bash("echo [$x] $(type -t f) $(basename $PWD)")).content == "[] workspace"
        assert (await hands.bash("echo $y", terminal="second")).content == "kept"
    await until(lambda: sleeping(tmp_path / "node", "conversation") == [], what="the end of the old shell's programs")
    assert "undone" in await hands.edit("undo_edit", file)
    assert (await hands.bash("cat file")).content == "one"
    assert (await hands.bash("", control="reset", terminal="second")).exit_code == 0
    assert (await hands.bash("echo [$y]", terminal="second")).content == "[]"


async def test_there_are_only_so_many_terminals(hands: ModelHands) -> None:
    for number in range(16):
        assert (await hands.bash("true", terminal=f"t{number}")).exit_code == 0
    refused = await hands.bash("true", terminal="another")
    assert refused.content.startswith("ERROR: There are 16 terminals already. Kill one first.\nmain: ")
    assert (await hands.bash("true", terminal="t3")).exit_code == 0


@pytest.mark.parametrize("terminal", ["a b", "x" * 33])
async def test_unusable_terminal_names_are_refused(hands: ModelHands, terminal: str) -> None:
    with pytest.raises((ToolCallError, ValueError)):
        await hands("execute_bash", command="ls", terminal=terminal)
    for arguments in ({"command": "", "control": "burn"}, {}):
        with pytest.raises((ToolCallError, ValueError)):
            await hands("execute_bash", **arguments)


async def test_a_new_host_says_that_jobs_are_gone(workspaces: Workspaces) -> None:
    hands = ModelHands(await workspaces.open("conversation"))
    await hands.bash("sleep 1005", is_background=True)
    await workspaces.close("conversation")
    hands.workspace = await workspaces.open("conversation")
    gone = await hands.bash("", terminal="job-1")
    assert gone.content.startswith("ERROR: There is no terminal `job-1`.")
    assert "other terminals and all programs that were running" in (await hands.bash("echo")).agent_text


async def test_jobs_and_the_shell_answer_at_the_same_time(hands: ModelHands) -> None:
    await hands.bash("read x; echo $x", is_background=True)
    slow = asyncio.ensure_future(hands.bash("read x < /dev/tty; echo main", timeout=60))
    quick = await hands.bash("quick", is_input="true", terminal="job-1", timeout=60)
    assert quick.content == "quick"
    typed = await hands.bash("", control="list")
    assert not isinstance(typed, ErrorObservation)
    await hands.workspace.interrupt(None)
    assert (await slow).exit_code != 0
