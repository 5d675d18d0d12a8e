"""Terminal output as text: kept and removed parts, and bounds of time and size."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract.observations import TRUNCATION_MARKER
from broker.secrets.masking import MASK, Masker
from tool_worker.host.shell.output_buffer import OutputBuffer
from tool_worker.host.shell.terminal_text import TerminalScreen, TooCostly, plain_text

SECRET = "ghp_0123456789abcdef"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"plain\n\ttext\n", "plain\n\ttext\n"),
        ("Grüße, 世界 🙂".encode(), "Grüße, 世界 🙂"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"a\x00b\x07c\x7fd\xc2\x85e", "abcde"),
        (b"\x1b[1;31mred\x1b[0m \x1b[?25lhidden\x1b(B", "red hidden"),
        (b"\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "alink"),
        (b"\x1b]not ended\nkept", "not ended\nkept"),
        (b"\x1bP1$r0m\x1b\\kept", "kept"),
        (b"one\r\ntwo\r\r\n", "one\ntwo\n"),
        (b"  1%\r 50%\r100%\n", "100%\n"),
        (b"longer\rab\n", "abnger\n"),
        (b"working...\r\x1b[Kdone\n", "done\n"),
        (b"frame 1\x1b[2K\x1b[1Gframe 2\n", "frame 2\n"),
        (b"N\x08NA\x08AM\x08ME\x08E", "NAME"),
        (b"abc\x08\x08\x08\x08X", "Xbc"),
        (b"make\n\x1b[H\x1b[2Jframe 1\nold\x1b[H\x1b[2Jframe 2\n", "make\nframe 2"),
        (b"pull a\npull b\n\x1b[2A\rdone a\x1b[K\n\x1b[1B", "done a\npull b"),
        (b"shell\n\x1b[?1049h\x1b[2;3Hmenu\x1b[?1049lback\n", "shell\n\n  menu\nback"),
        (b"\x1b[H\x1b(0lqk\x1b(B\x1b[3;1Hend", "┌─┐\n\nend"),
        (b"\x1b[H" + b"left" + b" " * 900 + b"right" + b" " * 91, "left        right"),
        (b"\x1b[H" + b"-" * 1000, "-" * 40),
        (
            b"\x1b[H" + (b"|" + b" " * 998 + b"|\n") * 900 + b"\x1b[901;1Hend",
            "|        |\n[the same line 899 more times]\nend",
        ),
        (b"\x1b[5;5Hx" + b"\x1b[2;1Habc\x1b[1;1Hdef\x1b[1P\x1b[1D\x1b[X\x1b[0J", "de"),
        (b"\x1b[Habcdef\x1b[1;3H\x1b[2@XY\x1b[1;1H\x1b[1Lnew", "new\nabXYcdef"),
    ],
)
def test_text_equals_the_visible_screen(raw: bytes, text: str) -> None:
    assert plain_text(raw) == text


@given(
    st.binary(max_size=300)
    | st.lists(st.sampled_from([b"\x1b", b"[", b"]", b"2K", b"\r", b"\b", b"\n", b"x", b"\xc3"])).map(b"".join)
    | st.lists(
        st.tuples(st.integers(0, 1200), st.integers(0, 1200), st.sampled_from("ABCDEFGHJKLMPX@defm`")).map(
            lambda part: f"ab\x1b[{part[0]};{part[1]}{part[2]}\t\n".encode()
        ),
        max_size=30,
    ).map(b"".join)
)
def test_no_control_character_is_left(raw: bytes) -> None:
    assert not CONTROL.search(plain_text(raw))


WORST = [b"\x1b]", b"\x1bP", b"\x1b[", b"\r", b"x\b", b"\x1b[2K", b"x\x1b[K", b"\r\x1b[1G", b"\x1b"]
WORST_ON_SCREEN = [
    *(b"\x1b[H\x1b[2J", b"\x1b[999Cx\n\x1b[H", b"\x1b[1000;1000Hx\x1b[1K", b"\x1b[1000L", b"\x1b[1000M\x1b[999B"),
    *(b"\x1b[1J\x1b[999B", b"x\x1b[A\n", b"\x1b[9999999999999999999B", b"\x1b7\x1b8\x1bM", b"\t\x1b[B"),
    *(b"\x1b[1;1;1;1H", b"\x1b[?1049h\x1b[999d", b"\x1b[@x\x1b[P\x1b[J"),
]


@pytest.mark.parametrize("unit", [*WORST, *WORST_ON_SCREEN])
def test_time_grows_with_the_length_only(unit: bytes) -> None:
    # 256 KiB of the worst; anything quadratic would take minutes and run into the limit of the test.
    plain_text(unit * (256 * 1024 // len(unit)))


def test_output_is_reported_once() -> None:
    buffer = OutputBuffer(20)
    buffer.add(b"a" * 30)
    assert buffer.take(is_final=False) == ("a" * 10 + TRUNCATION_MARKER + "a" * 10, 10)
    assert buffer.take(is_final=True) == ("", 0)
    buffer.add(b"rest")
    assert buffer.take(is_final=True) == ("rest", 0)


@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_of_long_output_head_and_tail_are_kept(piece: int) -> None:
    raw = bytes(range(ord("0"), ord("z"))) * 100
    buffer = OutputBuffer(40)
    for start in range(0, len(raw), piece):
        buffer.add(raw[start : start + piece])
    head, tail = raw[:20].decode(), raw[-20:].decode()
    assert buffer.take(is_final=True) == (head + TRUNCATION_MARKER + tail, len(raw) - 40)


def test_incomplete_characters_and_escapes_wait_for_their_rest() -> None:
    buffer = OutputBuffer(100)
    for first, rest, texts in [
        (b"a\xc3", b"\xa9b", ("a", "éb")),
        (b"a\xf0\x9f\x99", b"\x82b", ("a", "🙂b")),
        (b"a\x1b[1;3", b"1mb", ("a", "b")),
        (b"a\x1b]0;ti", b"tle\x07b", ("a", "b")),
        ("aé".encode(), b"b", ("aé", "b")),
    ]:
        buffer.add(first)
        before = buffer.take(is_final=False)[0]
        buffer.add(rest)
        assert (before, buffer.take(is_final=True)[0]) == texts
    buffer.add(b"a\xc3")
    assert buffer.take(is_final=True) == ("a\ufffd", 0)


def test_secret_remainder_beside_the_mark_is_masked() -> None:
    for place in range(8, len(SECRET) - 7):
        for before, after in ((20 - place, 300), (300, 20 - len(SECRET) + place)):
            buffer = OutputBuffer(40)
            buffer.add(b"." * before + SECRET.encode() + b"." * after)
            text, omitted = buffer.take(is_final=True)
            shown = Masker([SECRET]).mask_wire({"content": text})["content"]
            assert omitted
            assert MASK in shown
            assert not set(shown.replace(TRUNCATION_MARKER, "").replace(MASK, "")) - {"."}


def test_a_character_that_the_cut_went_through_is_left_out() -> None:
    buffer = OutputBuffer(8)
    buffer.add(b"abcd" + b"-" * 50 + "xéy".encode())
    assert buffer.take(is_final=True) == ("abcd" + TRUNCATION_MARKER + "xéy", 50)
    buffer.add(b"abcd" + b"-" * 50 + "éxyz".encode())
    assert buffer.take(is_final=True) == ("abcd" + TRUNCATION_MARKER + "xyz", 51)


@pytest.mark.parametrize("erasing", ["\x1b[1K", "\x1b[1J", "\x1b[24000X\x1b[P"])
def test_erasing_long_lines_again_and_again_has_its_price(erasing: str) -> None:
    with pytest.raises(TooCostly):
        TerminalScreen().play("\x1b[A" + "x" * 25_000 + "\r" * (erasing[-1] == "P") + erasing * 10_000)
