"""Marks in terminal output: found however the stream is cut, and only with the number that was given out."""

from __future__ import annotations

import shlex
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tool_worker.host.shell.command_marks import CommandEnd, CommandMark, MarkScanner, end_line, quote, start_line

NONCE = b"0123456789abcdef0123456789abcdef"
OTHER = b"f" * 32
BEGIN = b"\x1e" + NONCE + b"<\x1e"
END = b"\x1e" + NONCE + b">0\x1f\x1f/tmp\x1f/usr/bin:/bin\x1e"


def vars_of(end: CommandEnd) -> tuple[int, int, str, str]:
    return end.exit_code, end.background_pid, end.working_dir, end.search_path


def _scan(chunks: list[bytes], *nonces: bytes) -> tuple[bytes, list[tuple[bytes, list[str] | None]]]:
    scanner = MarkScanner()
    for nonce in nonces:
        scanner.expect(nonce)
    pieces = [piece for chunk in chunks for piece in scanner.feed(chunk)]
    output = b"".join(piece for piece in pieces if isinstance(piece, bytes))
    return output, [(piece.nonce, piece.fields) for piece in pieces if isinstance(piece, CommandMark)]


@given(cuts=st.lists(st.integers(0, 200), max_size=8), noise=st.binary(max_size=60))
def test_marks_are_found_wherever_the_stream_is_cut(cuts: list[int], noise: bytes) -> None:
    stream = BEGIN + noise + b"output" + END + b"later"
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[start:stop] for start, stop in pairwise(bounds)]
    output, marks = _scan(chunks, NONCE)
    assert output == noise + b"output" + b"later"
    assert marks == [(NONCE, None), (NONCE, ["0", "", "/tmp", "/usr/bin:/bin"])]


@pytest.mark.parametrize(
    "lookalike",
    [
        b"\x1e" + OTHER + b">0\x1f\x1f/\x1f/\x1e",
        b"\x1e\x1e\x1e",
        b"\x1e" + NONCE[:31] + b"\x1e",
        NONCE + b">0\x1f\x1f/\x1f/",
    ],
)
def test_text_like_a_mark_is_output(lookalike: bytes) -> None:
    assert _scan([lookalike + b"x"], NONCE) == (lookalike + b"x", [])


def test_a_mark_of_an_earlier_command_is_not_output() -> None:
    assert _scan([b"a" + END + b"b"], NONCE, OTHER) == (b"ab", [(NONCE, ["0", "", "/tmp", "/usr/bin:/bin"])])


def test_a_mark_that_never_ends_does_not_pile_up() -> None:
    endless = b"\x1e" + NONCE + b">" + b"x" * 100_000
    assert _scan([endless], NONCE) == (endless, [])
    output, marks = _scan([endless[:1000], endless[1000:], END], NONCE)
    assert (output, marks) == (endless, [(NONCE, ["0", "", "/tmp", "/usr/bin:/bin"])])


def test_the_fields_of_an_end() -> None:
    end = CommandEnd(["7", "", "/tmp", "/bin"])
    assert (end.exit_code, end.background_pid, end.working_dir, end.search_path) == (7, -1, "/tmp", "/bin")
    assert vars_of(CommandEnd(["0", "1", "/odd", "name", "/bin"])) == (0, 1, "/odd", "name")
    assert vars_of(CommandEnd(["0", "1", "/odd"])) == (0, 1, "/odd", "")
    assert CommandEnd(["0", "123", "/", ""]).background_pid == 123


@given(st.text(alphabet=st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])))
def test_a_quoted_word_is_one_word(text: str) -> None:
    assert shlex.split(quote(text)) == [text]


def test_lines_for_bash() -> None:
    line = start_line("n", "echo hi", "/dev/pts/1", previous_exit_code=0, environment={"A": "b c"}, cwd=None)
    assert line == (
        b"\\builtin printf '\\036n<\\036' >/dev/pts/1 2>/dev/null || \\exit; "
        b"A='b c' \\builtin command eval 'echo hi' </dev/pts/1 >/dev/pts/1 2>&1\n"
    )
    line = start_line("n", "x", "/dev/pts/1", previous_exit_code=3, environment={}, cwd="/a b")
    assert line.endswith(
        b"; (\\builtin exit 3) || { \\builtin cd -- '/a b' && \\builtin command eval 'x' </dev/pts/1 >/dev/pts/1 2>&1; } >/dev/pts/1 2>&1\n"
    )
    assert end_line("n", "/dev/pts/1").count(b"\n") == 1
