"""`deckhands run` and `logs` on a real terminal: what a person sees, and what scripts get instead."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.integration.command_line import COMMAND, environment, finish, script
from tests.terminal_parts import Person, person

STATUS = re.compile(r"^[-|/\\] step \d+ · \S+ tokens · .+ · \d+:\d\d · ")
OURS = re.compile(rb"\x1b\[(?:[012]m|3[126]m|J|\d*A)")
EVIL = r"printf '\033]0;evil\007\033[31mred\033[2J \302\23331m \342\200\256abc\n'"


def _bottom(seen: Person) -> str:
    return next(line for line in reversed(seen.lines) if line)


def _bash(command: str, **more: str) -> dict[str, object]:
    return {**more, "tool_calls": [{"name": "execute_bash", "arguments": {"command": command}}]}


def test_a_person_reads_a_run_and_its_log(tmp_path: Path) -> None:
    folder, home = tmp_path / "folder", tmp_path / "home"
    folder.mkdir()
    (folder / "a.txt").write_text("one\ntwo\nthree\n")
    edit = {"command": "str_replace", "path": f"{folder}/a.txt", "old_str": "two", "new_str": "zwei"}
    model = script(
        tmp_path / "model.json",
        _bash("seq 1 60; until test -e go; do sleep 0.1; done", thinking="Let me look.", text="I list the files."),
        {"tool_calls": [{"name": "str_replace_editor", "arguments": edit}]},
        _bash(EVIL),
        finish("Done."),
    )
    env = environment(home)
    run = [*COMMAND, "run", "--sandbox", "none", "-t", "do it", "-w", folder, "--model", model]
    with person(run, env, rows=14) as seen:
        seen.waits_for("$ seq 1 60", "~ Let me look.", " · $ seq 1 60; until", limit=90)
        assert STATUS.match(_bottom(seen)), seen.text
        (folder / "go").touch()
        assert seen.leaves() == 0
        text = "\n".join(seen.scrolled)
        assert "  4\n  … 49 more lines …\n  54\n" in text, text
        assert "  -two\n  +zwei\n" in text, text
        assert "State:        finished" in text, text
        assert "I list the files." in text, text
        assert not [line for line in seen.scrolled if STATUS.match(line)], "the line has scrolled away"
        raw = bytes(seen.raw)
        assert b"\x1b[32m  +zwei\x1b[0m" in raw
        assert b"\x1b[31m  -two\x1b[0m" in raw
        left = OURS.sub(b"", raw)
        assert not re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\x8e\x8f\xa8-\xae]", left), (
            left
        )
    (run_folder,) = (home / "runs").iterdir()
    _see_the_log(run_folder.name, home)


def _see_the_log(name: str, home: Path) -> None:
    env = environment(home)
    piped = subprocess.run([*COMMAND, "logs", name], env=env, capture_output=True, text=True, check=True).stdout
    assert "\x1b" not in piped
    assert "\n\n" not in piped
    for arguments, more in ((["--plain"], {}), ([], {"NO_COLOR": "1"}), ([], {"TERM": "dumb"})):
        with person([*COMMAND, "logs", name, *arguments], env | more, columns=200) as seen:
            assert seen.leaves() == 0
            assert bytes(seen.raw).decode().replace("\r\n", "\n") == piped, "scripts and their writers see the same"
    with person([*COMMAND, "logs", "--full", name], env, rows=100) as seen:
        assert seen.leaves() == 0
        assert "  30" in seen.lines, seen.text
        assert "more lines" not in seen.text
        assert b"\x1b[32m  +zwei\x1b[0m" in seen.raw
