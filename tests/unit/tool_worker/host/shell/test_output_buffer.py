"""Output that nobody has read yet: bounded, reported once, and cut where nothing is lost that still comes."""

from __future__ import annotations

from broker.contract.observations import TRUNCATION_MARKER
from broker.secrets.masking import MASK, Masker
from tool_worker.host.shell.output_buffer import OutputBuffer

SECRET = "ghp_0123456789abcdef"


def test_output_is_reported_once() -> None:
    buffer = OutputBuffer(20)
    buffer.add(b"a" * 30)
    assert buffer.take(is_final=False) == ("a" * 10 + TRUNCATION_MARKER + "a" * 10, 10)
    assert buffer.take(is_final=True) == ("", 0)
    buffer.add(b"rest")
    assert buffer.take(is_final=True) == ("rest", 0)


def test_incomplete_character_waits_for_the_next_report() -> None:
    buffer, word = OutputBuffer(100), "grün".encode()
    buffer.add(word[:3])
    assert buffer.take(is_final=False) == ("gr", 0)
    buffer.add(word[3:])
    assert buffer.take(is_final=True) == ("ün", 0)


def test_long_output_keeps_head_and_tail_in_any_chunks() -> None:
    buffer = OutputBuffer(20)
    for number in range(1000):
        buffer.add(b"%03d" % number)
    text, omitted = buffer.take(is_final=True)
    assert text == "0000010020" + TRUNCATION_MARKER + "6997998999"
    assert omitted == 3000 - 20


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
