"""The shell as the model meets it: every state, text and limit, through a real host."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import psutil
import pytest

from broker.contract.observations import CmdOutputObservation
from tests.integration.workspace_hosts import LIMIT_SECONDS, Gate, Output, Terminal, gone, main_pid, opened, sleeping
from tests.polling import until
from tool_worker.errors import HostRefused

CUT = "\n[... Observation truncated due to length ...]\n"
BELOW = "[Below is the output of the previous command.]\n"

SCREENS = """
import curses
def main(screen):
    for number in range(3):
        screen.erase()
        screen.border()
        screen.addstr(1, 2, f"frame {number}")
        screen.addstr(20, 500, "right")
        screen.refresh()
curses.wrapper(main)
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return tmp_path / "node" / "conversation" / "workspace"


async def test_command_answer_has_output_and_prompt_facts(run: Terminal, workspace: Path) -> None:
    answer = await run("echo hi; echo oops >&2; false")
    assert (answer.content, answer.exit_code, answer.prefix, answer.state) == ("hi\noops", 1, "", "completed")
    assert answer.suffix == "\n[The command completed with exit code 1.]"
    assert answer.fields["working_dir"] == str(workspace)
    assert answer.fields["hostname"] == os.uname().nodename
    assert answer.fields["username"] == "root" if os.getuid() == 0 else answer.fields["username"]
    assert os.access(answer.fields["py_interpreter_path"], os.X_OK)


async def test_directory_variables_functions_aliases_and_the_exit_code_persist(run: Terminal, workspace: Path) -> None:
    await run("mkdir inner && cd inner && export A=1 && B=2 && f() { echo f$1; } && alias say='echo said'")
    shown = await run("pwd; echo $A$B; f 3; say it; env | grep -c ^A=1")
    assert shown.content == f"{workspace}/inner\n12\nf3\nsaid it\n1"
    assert (await run("(exit 7)")).exit_code == 7
    assert (await run("echo $?")).content == "7"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("cat <<'X'\na'b\n\\;\nX", "a'b\n\\;"),
        ("echo one \\\n two", "one two"),
        ("cat <<- X; echo $((1<<2)); cat <<< '<<Y'\n\ta\n\tX", "a\n4\n<<Y"),
        ("echo '<<X' # <<Y", "<<X"),
        ("# only a comment", ""),
        ("echo 'it''s' \\; \"!x\" $((1+1))", "its ; !x 2"),
        ("if", "bash: syntax error: unexpected end of file"),
        ("for i in 1 2; do\n  echo $i\ndone", "1\n2"),
        ("tty | grep -c /dev/pts", "1"),
    ],
)
async def test_any_text_is_run_as_it_is(run: Terminal, command: str, expected: str) -> None:
    assert (await run(command)).content == expected


async def test_long_commands_and_long_output_pass(run: Terminal) -> None:
    answer = await run(f"x='{'y' * 300_000}'; echo ${{#x}}")
    assert answer.content == "300000"
    many_lines = "\n".join(f"echo {number}" for number in range(2000))
    assert (await run(many_lines)).content == "\n".join(str(number) for number in range(2000))


async def test_of_long_output_head_and_tail_are_kept(run: Terminal) -> None:
    answer = await run("printf 'x%.0s' {1..1000}; head -c 10000000 /dev/zero | tr '\\0' z; echo END")
    head, tail = answer.content.split(CUT)
    assert head == "x" * 1000 + "z" * (128 * 1024 - 1000)
    assert tail == "z" * (128 * 1024 - 4) + "END"
    assert answer.fields["omitted_bytes"] == 1000 + 10_000_000 + 4 - 256 * 1024


async def test_binary_output_comes_out_as_text(run: Terminal) -> None:
    every_byte = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 800)"
    answer = await run(f"python3 -c '{every_byte}'; printf '\\na\\0b\\377\\033[31mred\\033[0m'; echo; echo end")
    assert answer.content.endswith("\nab\ufffdred\nend")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f]", answer.content)
    assert (await run("echo next")).content == "next"


async def test_a_program_cannot_fake_the_end_of_a_command(run: Terminal) -> None:
    fake = "printf '\\036%s>0\\0370\\037/\\037/bin\\036' 0123456789abcdef0123456789abcdef; set -x; echo on"
    answer = await run(fake)
    assert answer.content.endswith("++ echo on\non")
    assert answer.content.startswith("0123456789abcdef0123456789abcdef>00//bin")
    answer = await run("set +x; (exit 5)")
    assert (answer.exit_code, answer.content) == (5, "++ set +x")


async def test_command_that_changes_the_shell_still_reports_its_end(run: Terminal) -> None:
    for command in (
        "exec 2>/dev/null",
        "exec >/dev/null",
        "exec </dev/null",
        "printf() { echo mine; }",
        "eval() { echo mine; }",
        "command() { echo mine; }",
        "PS1='(venv) '; PS2='more '; PROMPT_COMMAND='echo prompt'",
        "trap 'echo debug' DEBUG",
        "set -o posix",
        "set -u; unset PWD",
        "stty raw echo; kill -INT $$",
    ):
        await run(command)
    answer = await run("trap - DEBUG; echo still here")
    assert answer.content.splitlines()[-1] == "still here"
    assert (await run("echo $nothing")).content == "bash: nothing: unbound variable"


async def test_odd_directories_and_paths_do_no_harm(run: Terminal) -> None:
    for command in ("mkdir $'a\\036b' $'c\\037d' $'e\\nf' $'g\\377h'", "cd $'a\\036b'", "cd ../$'c\\037d'"):
        assert (await run(command)).exit_code == 0
    assert (await run("cd ../$'e\\nf'")).fields["working_dir"].endswith("/e\nf")
    assert (await run("cd ../$'g\\377h'")).fields["working_dir"].endswith("/g\udcffh")
    assert (await run("PATH=$(head -c 100000 /dev/zero | tr '\\0' a):$PATH")).exit_code == 0
    assert (await run("rmdir $PWD; pwd | wc -l")).content == "1"
    assert (await run("exit 0")).exit_code == 0
    assert (await run("echo alive")).content == "alive"


async def test_a_silent_command_is_answered_and_goes_on(run: Terminal, workspace: Path) -> None:
    gate = Gate(workspace, "gate")
    answer = await run("echo before; read x < gate; echo after $x", no_change_timeout=0.2)
    assert (answer.content, answer.exit_code, answer.state) == ("before", -1, "no_change_timeout")
    assert answer.suffix.startswith("\n[The command has no new output after 0.2 seconds. You may wait longer")
    waiting = asyncio.create_task(run(""))
    gate.open()
    answer = await waiting
    assert (answer.content, answer.exit_code, answer.prefix) == ("after go", 0, "")
    assert (await run("")).content == "ERROR: No previous running command to retrieve logs from."


async def test_output_is_reported_once(run: Terminal, workspace: Path) -> None:
    gate = Gate(workspace, "gate")
    first = await run("echo 1; read x < gate; echo 2; read x < gate; echo 3", no_change_timeout=0.2)
    gate.open()
    second = await run("", no_change_timeout=0.2)
    gate.open()
    third = await run("")
    assert [first.content, second.content, third.content] == ["1", "2", "3"]
    assert [first.prefix, second.prefix, third.prefix] == ["", BELOW, ""]


async def test_output_keeps_a_command_from_being_called_silent(run: Terminal) -> None:
    answer = await run("for i in 1 2 3 4 5; do echo $i; sleep 0.25; done", no_change_timeout=1)
    assert (answer.state, answer.content) == ("completed", "1\n2\n3\n4\n5")


async def test_the_hard_limit_holds_for_noisy_and_for_blocking_commands(run: Terminal) -> None:
    answer = await run("while true; do echo x; sleep 0.05; done", timeout=0.3)
    assert (answer.exit_code, answer.state) == (-1, "hard_timeout")
    assert answer.suffix.startswith("\n[The command timed out after 0.3 seconds. You may wait longer")
    assert (await run.type("C-c")).exit_code == 130
    answer = await run("sleep 100", timeout=0.3, blocking=True, no_change_timeout=0.1)
    assert answer.state == "hard_timeout"


async def test_interrupt_between_two_programs_of_a_command_is_kept(run: Terminal) -> None:
    for _ in range(20):
        assert (await run("while true; do echo x; sleep 0.0001; done", timeout=0.05)).state == "hard_timeout"
        assert (await run.type("C-c", timeout=20)).exit_code == 130


@pytest.mark.parametrize(
    ("program", "key", "shown"),
    [
        ("try: begin(100)\nexcept KeyboardInterrupt: print('done')", "C-c", "done"),
        ("signal.signal(signal.SIGQUIT, lambda *_: print('quit', flush=True))\nbegin(1)", "C-\\", "quit"),
    ],
)
async def test_program_that_handles_a_key_gets_it_once(
    run: Terminal, workspace: Path, program: str, key: str, shown: str
) -> None:
    begin = "import signal, time\ndef begin(seconds):\n  open('begun', 'w')\n  time.sleep(seconds)"
    await run(f'python3 -c "{begin}\n{program}"; sleep 1; echo next', no_change_timeout=0.1)
    await until((workspace / "begun").exists)
    answer = await run.type(key)
    assert (answer.content, answer.exit_code) == (f"{shown}\nnext", 0)


async def test_limit_starts_with_the_command_not_with_its_wait(run: Terminal, workspace: Path) -> None:
    gate = Gate(workspace, "gate")
    first = asyncio.create_task(run("read x < gate"))
    second = asyncio.create_task(run("echo begun > begun; sleep 100", timeout=0.5))
    while (await run.workspace.connection.ping()).running != (1, 2):
        await asyncio.sleep(0)
    assert (await run("sleep 0.7", is_static=True)).exit_code == 0  # longer than the second one may take
    assert not second.done()
    gate.open()
    assert (await first).exit_code == 0
    assert (await second).state == "hard_timeout"
    assert (workspace / "begun").exists()


def explanation(answer: Output) -> str:
    return CmdOutputObservation.model_validate({"command": "", **answer.fields}).explanation


async def test_commands_without_an_end_are_explained_to_users(run: Terminal, workspace: Path) -> None:
    gate = Gate(workspace, "gate")
    silent = await run("read x < gate", no_change_timeout=0.1)
    assert explanation(silent) == "The command has no new output after 0.1 seconds."
    late = await run("", timeout=0.1)
    assert explanation(late) == "The command timed out after 0.1 seconds."
    refused = await run("ls")
    assert explanation(refused).startswith('The command "ls" is NOT executed. The previous command is still running')
    assert "You may" not in explanation(refused)
    gate.open()
    await run.settled()
    assert explanation(await run("true")) == ""


async def test_a_new_command_is_refused_while_one_is_running(run: Terminal, workspace: Path) -> None:
    gate = Gate(workspace, "gate")
    await run("echo one; read x < gate", no_change_timeout=0.1)
    answer = await run("touch never")
    assert (answer.exit_code, answer.state, answer.prefix) == (-1, "refused", BELOW)
    assert answer.suffix.startswith(
        '\n[Your command "touch never" is NOT executed. The previous command is still running - '
    )
    gate.open()
    assert (await run("")).exit_code == 0
    assert not (workspace / "never").exists()


async def test_a_running_program_gets_input(run: Terminal) -> None:
    answer = await run("read -p 'name? ' x; echo hello $x; cat", no_change_timeout=0.2)
    assert answer.content == "name?"
    assert (await run.type("you; ls", no_change_timeout=0.2)).content == "hello you; ls"
    assert (await run.type("more", no_change_timeout=0.2)).content == "more"
    answer = await run.type("C-d")
    assert (answer.exit_code, answer.suffix) == (0, "\n[The command completed with exit code 0. CTRL+D was sent.]")
    assert (await run.type("x")).content == "ERROR: No previous running command to interact with."


async def test_input_is_typed_unchanged_and_enter_can_be_pressed(run: Terminal) -> None:
    program = "import sys; print(list(iter(sys.stdin.readline, 'end\\n')))"
    silence = {"no_change_timeout": 0.05}
    await run(f'python3 -c "{program}"', **silence)
    for text in ("    indented = 1  ", "\n", "for x in y:\n    f(x)\n\n", "answered\n", ""):
        assert (await run.type(text, **silence)).state == "no_change_timeout"
    typed = ["    indented = 1  \n", "\n", "for x in y:\n", "    f(x)\n", "\n", "answered\n"]
    assert (await run.type("end", timeout=60, blocking=True)).content == str(typed)


async def test_a_program_that_draws_screens_costs_few_characters(run: Terminal, workspace: Path) -> None:
    (workspace / "screens.py").write_text(SCREENS)
    drawn = await run("TERM=xterm python3 screens.py", timeout=60, blocking=True)
    assert len(drawn.content) < 2_000
    assert "frame 2" in drawn.content
    assert "frame 0" not in drawn.content
    assert "[the same line" in drawn.content


@pytest.mark.parametrize(
    ("command", "lines", "expected"),
    [
        ("cat << EOF", ["line 1", "  line 2", "EOF"], "line 1\n  line 2"),
        ("cat <<-'two words' | tr a b; echo $((1<<2))\na\\$x", ["\ttwo words"], "b\\$x\n4"),
        ("cat <<A; cat <<'B'\n1\nA", ["2", "B"], "1\n2"),
        ("cd / && cat << EOF", ["$PWD", "C-d"], "bash: warning: here-document at line"),
    ],
)
async def test_unfinished_here_document_takes_typed_lines(
    run: Terminal, command: str, lines: list[str], expected: str
) -> None:
    answer = await run(command, no_change_timeout=0.5)
    assert (answer.content, answer.exit_code, answer.prefix, answer.state) == ("", -1, "", "no_change_timeout")
    for line in lines[:-1]:
        answer = await run.type(line, no_change_timeout=0.5)
        assert (answer.content, answer.exit_code, answer.prefix) == ("", -1, BELOW)
    answer = await run.type(lines[-1])
    assert answer.content.startswith(expected)
    assert (answer.exit_code, answer.prefix) == (0, "")


async def test_unfinished_here_document_can_be_interrupted(run: Terminal) -> None:
    await run("x=1; cat << EOF", no_change_timeout=0.5)
    assert (await run.type("C-c")).exit_code == 130
    assert (await run("echo next$x")).content == "next"


async def test_input_that_nobody_read_is_not_run_as_a_command(run: Terminal, workspace: Path) -> None:
    gate = Gate(workspace, "gate")
    await run("read x < gate", no_change_timeout=0.1)
    await run.type("touch never", no_change_timeout=0.1)
    gate.open()
    await run("")
    assert (await run('echo next; read -t 0.1 left; echo "<$left>"')).content == "next\n<>"
    assert not (workspace / "never").exists()


async def test_input_line_too_long_for_the_terminal_is_refused(run: Terminal) -> None:
    await run("cat | wc -c", no_change_timeout=0.1)
    answer = await run.type("x" * 4096)
    assert answer.suffix == "\n[Your input is NOT sent: the program takes lines of up to 4095 bytes.]"
    await run.type("\n".join(["y" * 4000] * 5), no_change_timeout=0.1)
    assert (await run.type("C-d")).content == str(4001 * 5)


@pytest.mark.parametrize(
    ("command", "key", "exit_code"),
    [
        ("touch begun; sleep 100; echo never", "C-c", 130),
        ("touch begun; while :; do :; done", "C-c", 130),
        ("for i in 1 2 3; do touch begun; sleep 100; echo never; done", "C-c", 130),
        ("sh -c 'touch begun; exec sleep 100'", "C-z", 148),
        ("touch begun; cat", "C-d", 0),
        ('python3 -c \'import time; open("begun", "w"); time.sleep(100)\'', "C-\\", 131),
    ],
)
async def test_keys_reach_the_program(run: Terminal, workspace: Path, command: str, key: str, exit_code: int) -> None:
    await run(command, no_change_timeout=0.1)
    # Until the program has the terminal, the shell reads the keys, and some mean nothing to it.
    await until((workspace / "begun").exists)
    answer = await run.type(key)
    assert (answer.state, answer.exit_code) == ("completed", exit_code)
    assert answer.suffix == f"\n[The command completed with exit code {exit_code}. CTRL+{key[2].upper()} was sent.]"
    assert "never" not in answer.content
    assert (await run("echo next")).content == "next"


async def test_keys_never_discard_output_of_the_terminal(run: Terminal) -> None:
    """Ctrl-C and Ctrl-\\ are repeated: one that came too late would take the mark of the command's end along."""
    for _ in range(2):
        assert "noflsh" in (await run("stty -a; stty sane")).content.split()


async def test_command_ending_unobserved_is_reported_with_next_call(run: Terminal, workspace: Path) -> None:
    gate = Gate(workspace, "gate")

    async def ends_unobserved() -> None:
        await run("read x < gate; echo rest; (exit 3)", no_change_timeout=0.1)
        gate.open()
        await run.settled()

    await ends_unobserved()
    answer = await run("")
    assert (answer.prefix, answer.content, answer.exit_code) == ("", "rest", 3)
    await ends_unobserved()
    answer = await run.type("late")
    assert (answer.prefix, answer.content, answer.exit_code) == ("", "rest", 3)
    assert answer.suffix == (
        "\n[The command completed with exit code 3.]"
        '\n[Your input "late" is NOT sent: the command had already completed.]'
    )
    await ends_unobserved()
    answer = await run("echo new $?")
    assert (answer.content, answer.exit_code) == ("new 3", 0)
    assert answer.prefix == f"{BELOW}rest\n[The command completed with exit code 3.]\n"


async def test_background_jobs_live_on_and_their_output_is_not_lost(run: Terminal, workspace: Path) -> None:
    gate, done = Gate(workspace, "gate"), Gate(workspace, "done")
    started = await run("(read x < gate; echo late; echo > done) &")
    assert started.exit_code == 0
    assert started.fields["pid"] > 1
    gate.open()
    await done.wait()
    assert (await run("echo now")).content == "late\nnow"


@pytest.mark.parametrize(("command", "exit_code"), [("exit 3", 3), ("kill -9 $$", 137), ("exec sh -c 'exit 4'", 4)])
async def test_command_ending_the_shell_is_answered_by_new_shell(
    run: Terminal, workspace: Path, command: str, exit_code: int
) -> None:
    await run("mkdir inner; cd inner; A=1")
    answer = await run(f"echo last; {command}")
    assert answer.content.startswith("last")
    assert answer.exit_code == exit_code
    assert answer.suffix == (
        f"\n[The command completed with exit code {exit_code}.]"
        f"\n[The command also ended the shell. The next command gets a new one in {workspace}/inner.]"
    )
    assert (await run("pwd; echo <$A>".replace("<", "'<'").replace(">", "'>'"))).content == f"{workspace}/inner\n<>"


@pytest.mark.parametrize("command", ["set -r", "ulimit -n 3", "enable -n printf"])
async def test_shell_that_cannot_report_a_commands_end_is_ended(run: Terminal, command: str) -> None:
    answer = await run(command)
    assert answer.state == "completed"
    assert "[The command also ended the shell. The next command gets a new one in " in answer.suffix
    assert (await run("echo $((1 + 1)) | cat")).content == "2"


@pytest.mark.parametrize("command", ["suspend", "kill -STOP $$"])
async def test_self_stopped_shell_continues_but_stopped_daemon_does_not(run: Terminal, command: str) -> None:
    assert (await run(command)).exit_code == 0
    await run(
        "(sleep 100 & echo $! > pid); kill -STOP $(cat pid); until grep -q State:.T /proc/$(cat pid)/status; do :; done"
    )
    assert (await run("cut -d' ' -f3 /proc/$(cat pid)/stat; kill -9 $(cat pid)")).content == "T"


async def test_shell_ending_between_commands_is_replaced_with_notice(run: Terminal, workspace: Path) -> None:
    gate = Gate(workspace, "gate")
    await run("cd /usr")
    shell = int((await run(f"echo $$; (read x < {workspace}/gate; kill -9 $$) &")).content.splitlines()[0])
    gate.open()
    await gone(shell)
    answer = await run("echo new; pwd")
    assert (answer.content, answer.exit_code) == ("new\n/usr", 0)
    assert answer.prefix == "[The previous shell ended with exit code 137. This is a new one.]\n"


async def test_variables_of_one_command_are_for_it_alone(run: Terminal) -> None:
    value = "a'b\"c $x\n`id`"
    answer = await run('echo "$TOKEN"; env | grep -c ^TOKEN=', env={"TOKEN": value})
    assert answer.content == f"{value}\n1"
    assert (await run('echo "<$TOKEN>"')).content == "<>"


async def test_a_command_can_be_sent_to_a_directory(run: Terminal, workspace: Path) -> None:
    await run("mkdir 'a b'")
    assert (await run("pwd", cwd=f"{workspace}/a b")).content == f"{workspace}/a b"
    assert (await run("pwd")).content == f"{workspace}/a b"
    answer = await run("echo never", cwd="/does/not/exist")
    assert (answer.exit_code, answer.content) == (1, "bash: cd: /does/not/exist: No such file or directory")


async def test_static_command_has_its_own_shell_that_ends(run: Terminal, workspace: Path, tmp_path: Path) -> None:
    gate = Gate(workspace, "gate")
    await run("A=1; read x < gate", no_change_timeout=0.1)
    answer = await run("pwd; echo $A.", is_static=True, cwd="/usr")
    assert (answer.content, answer.exit_code) == ("/usr\n.", 0)
    assert (await run("sleep 100", is_static=True, timeout=0.1)).state == "hard_timeout"
    gate.open()
    assert (await run("")).exit_code == 0
    assert (await run("echo $A")).content == "1"
    async with asyncio.timeout(LIMIT_SECONDS):
        while sleeping(tmp_path / "node", "conversation"):
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "`command` is not a text"),
        ({"command": "a\0b"}, "`command` has a NUL character, which a shell cannot take"),
        ({"command": "x", "timeout": 0}, "`timeout` is not a number of seconds above 0"),
        ({"command": "x", "env": {"a b": "c"}}, "`env` has a name that no variable can have: 'a b'"),
        ({"command": "x", "verbose": 1}, "BashCall.__init__() got an unexpected keyword argument 'verbose'"),
    ],
)
async def test_unusable_arguments_begin_nothing(run: Terminal, arguments: dict[str, object], problem: str) -> None:
    with pytest.raises(HostRefused) as refused:
        await run.workspace.run(77, "bash", arguments)
    assert (refused.value.code, refused.value.message, refused.value.retryable) == ("bad_arguments", problem, False)
    assert (await run.workspace.status(77)).state == "never_started"


async def test_commands_asked_for_at_once_run_one_after_the_other(run: Terminal) -> None:
    answers = await asyncio.gather(*(run(f"echo {number} >> order; cat order | wc -l") for number in range(20)))
    assert [answer.content for answer in answers] == [str(number + 1) for number in range(20)]


KEPT_BYTES = 256 * 1024
HOST_LIMIT_BYTES = 24 * 2**20
ALWAYS = {"timeout": 120, "blocking": True}


@pytest.mark.parametrize(
    ("command", "size", "head", "tail"),
    [
        ("yes abcdefg | head -c 100000000", 100_000_000, "abcdefg\nabcdefg\n", "abcdefg\nabcdefg"),
        ("seq 1000000", 6_888_896, "1\n2\n3\n", "\n999999\n1000000"),
        ("head -c 10000000 /dev/zero | tr '\\0' x; echo", 10_000_001, "xxxx", "xxxx"),
    ],
)
async def test_head_and_tail_are_kept_in_bounded_memory(
    tmp_path: Path, command: str, size: int, head: str, tail: str
) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        answer = await run(command, **ALWAYS)
        assert answer.fields["omitted_bytes"] == size - KEPT_BYTES
        assert answer.content.startswith(head)
        assert answer.content.endswith(tail)
        assert answer.content.count(CUT) == 1
        assert len(answer.content) <= KEPT_BYTES + len(CUT)
        assert psutil.Process(main_pid(tmp_path, "conversation")).memory_info().rss < HOST_LIMIT_BYTES
        assert (await run("echo next")).content == "next"


async def test_neighbours_go_on_while_one_floods(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        flooding = Terminal(await workspaces.open("flooding"))
        quiet = Terminal(await workspaces.open("quiet"))
        flood = asyncio.create_task(flooding("yes abcdefg | head -c 100000000; echo over", **ALWAYS))
        answers = 0
        while not flood.done():
            assert (await quiet("echo fine")).content == "fine"
            answers += 1
        assert answers > 10
        assert (await flood).content.endswith("over")


async def test_many_small_pieces_are_one_output(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        program = "import os\nfor n in range(20000): os.write(1, b'%d\\n' % n)"
        answer = await run(f'python3 -c "{program}"', **ALWAYS)
        assert answer.content.split() == [str(number) for number in range(20_000)]
