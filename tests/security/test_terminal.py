"""A terminal obeys what it is sent: nothing that a model, a file or a producer has written reaches it as it is."""

from __future__ import annotations

import ast
import os
import pty
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.command_line import COMMAND, environment

ROOT = Path(__file__).parents[2]
PATCH = b"diff --git a/x b/x\n+\x1b]0;title\x07\xff\r\n"
PRINT_PATCH = f"from deckhands.client.reading.terminal import print_patch; print_patch({PATCH!r})"


def on_terminal(*command: str, env: dict[str, str]) -> bytes:
    """Run a program whose standard output and error are a terminal; return its output."""
    ours, theirs = pty.openpty()
    sent = b""
    with subprocess.Popen(command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs):
        os.close(theirs)
        with suppress(OSError):  # so a terminal ends
            while piece := os.read(ours, 65536):
                sent += piece
    os.close(ours)
    return sent


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "x\x1b]0;title\x07"),
        ("no-such-\x1b[31mverb",),
        ("ls", "--no-such-\x9b2Joption"),
        ("run", "-t", "x", "-w", "/nowhere/\x1b]8;;http://evil.example\x07link"),
    ],
)
def test_an_error_is_shown_with_its_control_characters_spelt_out(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    shown = on_terminal(*COMMAND, *arguments, env=environment(tmp_path)).decode()
    assert "\\x" in shown
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)


def test_a_patch_is_readable_on_a_terminal_and_whole_elsewhere(tmp_path: Path) -> None:
    command = (COMMAND[0], "-c", PRINT_PATCH)
    shown = on_terminal(*command, env=environment(tmp_path))
    assert shown == b"diff --git a/x b/x\r\n+\\x1b]0;title\\x07\\xff\r\n"
    piped = subprocess.run(command, env=environment(tmp_path), cwd=ROOT, capture_output=True, check=True)
    assert piped.stdout == PATCH


PRINTING = {"click.echo", "click.secho", "print", "sys.stdout.write", "sys.stderr.write", "traceback.print_exc"}


def test_everything_that_is_printed_goes_through_one_file() -> None:
    elsewhere = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "deckhands").rglob("*.py"))
        if path != ROOT / "deckhands" / "client" / "reading" / "terminal.py" and "examples" not in path.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) in {name.rpartition(".")[2] for name in PRINTING}
        and ast.unparse(node.func) in PRINTING
    ]
    assert elsewhere == []
