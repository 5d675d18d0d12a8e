"""Hiding secrets: every form, cut anywhere, and nothing else."""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
import subprocess
import textwrap
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker.contract.observations import TRUNCATION_MARKER
from broker.secrets.masking import CUT_MARKERS, MASK, MaskedPieces, Masker, find_forms

SECRET = "c4n4ry-p@ss+w/rd?'\"é\\x"
SIGNS = "$ign`s&(a)<b>!*~[1];#"
PLAIN = "ghp_0123456789abcdefABCDEF"


def masked_in_pieces(masker: Masker, text: str, step: int) -> str:
    pieces = MaskedPieces(masker)
    return "".join(pieces.feed(text[at : at + step]) for at in range(0, len(text), step)) + pieces.finish()


def printed_by_bash(script: str, secret: str) -> str:
    environment = {"TOKEN": secret, "LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"}
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(["bash", "-c", script], env=environment, check=True, text=True, **told).stdout.strip()


ENCODINGS = {
    "raw": str,
    "reversed": lambda secret: secret[::-1],
    "hex": lambda secret: secret.encode().hex(),
    "python bytes": lambda secret: repr(secret.encode()),
    "HEX": lambda secret: secret.encode().hex().upper(),
    "json": lambda secret: json.dumps({"token": secret}),
    "json of json": lambda secret: json.dumps(json.dumps({"token": secret})),
    "json in UTF-8": lambda secret: json.dumps([secret], ensure_ascii=False),
    "url": lambda secret: "https://host/?token=" + quote(secret, safe=""),
    "path of a url": quote,
    "form": quote_plus,
    "lower case url": lambda secret: quote(secret, safe="").lower() if secret.islower() else quote(secret),
    "shell": lambda secret: f"curl -H {shlex.quote(secret)}",
    "python": repr,
    "html": lambda secret: f"<p>{html.escape(secret)}</p>",
    "git remote -v": lambda secret: f"origin https://user:{secret}@example.com/repository.git (fetch)",
    "base64": lambda secret: base64.b64encode(secret.encode()).decode(),
    "base64 with a newline": lambda secret: base64.b64encode(f"{secret}\n".encode()).decode(),
    "base64 within, at 1": lambda secret: base64.b64encode(f"x{secret}yz".encode()).decode(),
    "base64 within, at 2": lambda secret: base64.b64encode(f"xy{secret}z".encode()).decode(),
    "base64 within, at 3": lambda secret: base64.b64encode(f"xyz{secret}".encode()).decode(),
    "base64 of a header": lambda secret: base64.b64encode(f"user:{secret}".encode()).decode(),
    "url-safe base64": lambda secret: base64.urlsafe_b64encode(f"user:{secret}".encode()).decode(),
    "bash's declare": lambda secret: printed_by_bash("declare -p TOKEN", secret),
    "bash's %q": lambda secret: printed_by_bash("printf '%q' \"$TOKEN\"", secret),
    "bash's trace": lambda secret: printed_by_bash('set -x; : "$TOKEN"', secret),
    "JavaScript's URLs": lambda secret: quote(secret, safe="!'()*"),
    "JavaScript's URLs, whole": lambda secret: quote(secret, safe=";,/?:@&=+$!'()*#"),
    "JavaScript's forms": lambda secret: quote_plus(secret, safe="*").replace("~", "%7E"),
    "JavaScript's json of json": lambda secret: json.dumps(json.dumps(secret, ensure_ascii=False), ensure_ascii=False),
    "Go's json": lambda secret: json.dumps(secret, ensure_ascii=False).translate(
        {ord(character): f"\\u{ord(character):04x}" for character in "&<>"}
    ),
    "PHP's json": lambda secret: json.dumps(secret).replace("/", "\\/"),
    "Go's html": lambda secret: html.escape(secret).replace("&#x27;", "&#39;").replace("&quot;", "&#34;"),
    "xml": lambda secret: html.escape(secret).replace("&#x27;", "&apos;"),
    "yaml and SQL": lambda secret: "'" + secret.replace("'", "''") + "'",
    "csv": lambda secret: '"' + secret.replace('"', '""') + '"',
    "wrapped base64": lambda secret: textwrap.fill(base64.b64encode(secret.encode() * 3).decode(), 20),
    "wrapped": lambda secret: textwrap.fill(secret, 10, break_on_hyphens=False),
    "wrapped for Windows": lambda secret: f"{secret[:5]}\r\n{secret[5:12]}\r\n{secret[12:]}",
}


def through(*command: str) -> Callable[[str], str]:
    """Return a program's output of a value inside other text."""
    env = {"LC_ALL": "C", "PATH": "/usr/bin:/bin"}

    def encode(secret: str) -> str:
        said = f"say {secret} said".encode()
        done = subprocess.run(command, input=said, check=True, env=env, stdout=subprocess.PIPE)
        return f"\n{done.stdout.decode()}\n"

    return encode


def xxd(secret: str) -> str:
    raw, lines = f"say {secret} said".encode(), []
    for at in range(0, len(raw), 16):
        line = raw[at : at + 16]
        words = " ".join(line[word : word + 2].hex() for word in range(0, len(line), 2))
        shown = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in line)
        lines.append(f"{at:08x}: {words:<39}  {shown}")
    return "\n" + "\n".join(lines) + "\n"


def hexdump_c(secret: str) -> str:
    raw, lines = f"say {secret} said".encode(), []
    for at in range(0, len(raw), 16):
        line = raw[at : at + 16]
        shown = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in line)
        lines.append(f"{at:08x}  {line[:8].hex(' '):<23}  {line[8:].hex(' '):<23}  |{shown}|")
    return "\n" + "\n".join(lines) + "\n"


def of_each(form: str) -> Callable[[str], str]:
    """Return a form for each byte."""
    return lambda secret: "".join(form.format(byte) for byte in secret.encode())


WRITTEN_OUT = {
    "od": through("od"),
    "od -c": through("od", "-c"),
    "od -An -c": through("od", "-An", "-c"),
    "od -b": through("od", "-b"),
    "od -tx1": through("od", "-tx1"),
    "od -An -tx1": through("od", "-An", "-tx1"),
    "od -tx1z": through("od", "-tx1z"),
    "od -Ax -tx1z": through("od", "-Ax", "-tx1z"),
    "od -An -tu1": through("od", "-An", "-tu1"),
    "od -x": through("od", "-x"),
    "xxd": xxd,
    "xxd -p": lambda secret: textwrap.fill(f"say {secret}".encode().hex(), 60),
    "hexdump -C": hexdump_c,
    "hex with colons": lambda secret: secret.encode().hex(":"),
    "HEX with dashes": lambda secret: secret.encode().hex("-").upper(),
    "hex with blanks": lambda secret: secret.encode().hex(" "),
    "array of C": lambda secret: ", ".join(f"0x{byte:02x}" for byte in secret.encode()),
    "array of JavaScript": lambda secret: ",".join(str(byte) for byte in secret.encode()),
    "list of Python": lambda secret: str(list(secret.encode())),
    "escapes of C": of_each("\\x{:02x}"),
    "escapes of C in capitals": of_each("\\x{:02X}"),
    "octal escapes": of_each("\\{:03o}"),
    "every character of a URL": of_each("%{:02x}"),
    "every character of a URL, in capitals": of_each("%{:02X}"),
    "every other character of a URL": lambda secret: "".join(
        character if at % 2 and character.isalnum() else "".join(f"%{byte:02X}" for byte in character.encode())
        for at, character in enumerate(secret)
    ),
    "every character as \\u": lambda secret: "".join(f"\\u{ord(character):04x}" for character in secret),
    "every character as \\U": lambda secret: "".join(f"\\U{ord(character):08x}" for character in secret),
    "every character as \\u{}": lambda secret: "".join(f"\\u{{{ord(character):x}}}" for character in secret),
    "every character as %u": lambda secret: "".join(f"%u{ord(character):04X}" for character in secret),
    "entities": lambda secret: "".join(f"&#{ord(character)};" for character in secret),
    "hexadecimal entities": lambda secret: "".join(f"&#x{ord(character):X};" for character in secret),
    "UTF-16": lambda secret: secret.encode("utf-16-le").decode("latin-1") if secret.isascii() else secret,
    "base32": lambda secret: base64.b32encode(secret.encode()).decode(),
    "base32 within, at 1": lambda secret: base64.b32encode(f"x{secret}yz".encode()).decode(),
    "base32 within, at 3, in small letters": lambda secret: base64.b32encode(f"xyz{secret}".encode()).decode().lower(),
    "wrapped base32": lambda secret: textwrap.fill(base64.b32encode(secret.encode() * 3).decode(), 20),
    "capitals": lambda secret: secret.upper() if secret.isascii() else secret,
    "small letters": lambda secret: secret.lower() if secret.isascii() else secret,
    "with blanks": " ".join,
    "a character a line": "\n".join,
}
BEHIND = {
    "indented": "    {}",
    "numbered": "    12\t{}",
    "found by grep": "7:{}",
    "with a time": "2026-11-28T10:00:00Z INFO {}",
    "with a name": "build/out.bin: {}",
    "quoted": "> {}",
    "before more": "{} END",
}
"""What stands on the lines of a dump that does not begin them."""
DUMPS = ("od", "od -b", "od -c", "od -tx1", "od -tx1z", "od -Ax -tx1z", "od -An -tu1", "od -x", "xxd", "hexdump -C")
LEFT_BYTES = 2
"""How much of a value may be left at its ends, where words of two bytes or groups of five bits hold more than it."""


def decoded(text: str) -> Iterator[str]:
    """Yield everything that the rest of a text decodes to."""
    digits = re.sub(r"[^0-9a-f]|0x", "", re.sub(r"(?m)^[0-9a-f]{7,8}:?(?= )|  [ |>].*$", "", text.lower()))
    yield text.lower()
    yield re.sub(r"\s", "", text.lower())
    for at in (0, 1):
        yield bytes.fromhex(digits[at : at + (len(digits) - at) // 2 * 2]).decode("latin-1").lower()


@pytest.mark.parametrize("encode", WRITTEN_OUT.values(), ids=WRITTEN_OUT)
@pytest.mark.parametrize("secret", [PLAIN, SIGNS, "c4n4ry-p@ss:w,rd-é"])
def test_a_value_that_is_written_out_is_found(secret: str, encode: Callable[[str], str]) -> None:
    encoded = encode(secret)
    masked = Masker(["another-secret", secret]).mask_text(f"before {encoded} after é")
    assert MASK in masked
    assert masked.startswith("before ")
    assert masked.endswith(" after é")
    whole, raw = secret.lower(), secret.encode().decode("latin-1").lower()
    inner = {text[at : at + 6] for text in (whole, raw) for at in range(LEFT_BYTES, len(text) - 6 - LEFT_BYTES)}
    assert not [part for part in inner for shown in decoded(masked.replace(MASK, "|")) if part in shown]
    assert len(masked) < len(f"before {encoded} after é") - len(encoded) // 2 + 8 * len(MASK)


@pytest.mark.parametrize("dump", DUMPS)
@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_a_dump_that_does_not_begin_its_lines_is_found(behind: str, dump: str) -> None:
    masker = Masker([PLAIN])
    for before in range(17):
        lines = WRITTEN_OUT[dump](f"{'x' * before}{PLAIN}").strip("\n").splitlines()
        text = "\n".join(behind.format(line) for line in lines)
        masked = masker.mask_text(f"first line\n{text}\nlast line")
        assert masked.startswith("first line\n")
        assert masked.endswith("\nlast line")
        assert MASK in masked, text
        # Of a word of two bytes at each end, and of the column of characters before the value, something may be left.
        raw, left = PLAIN.encode(), masked.lower()
        shown = {
            raw[at : at + 4].hex(gap) if gap else raw[at : at + 4].hex()
            for at in range(4, len(raw) - 8)
            for gap in (" ", "")
        }
        assert not [part for part in shown if part in left.replace("  ", " ")], masked


@pytest.mark.parametrize("encode", WRITTEN_OUT.values(), ids=WRITTEN_OUT)
@pytest.mark.parametrize("steps", [pytest.param((1,), marks=pytest.mark.soak), (7, 64, 1000)])
def test_a_value_that_is_written_out_is_found_in_pieces(steps: Sequence[int], encode: Callable[[str], str]) -> None:
    masker = Masker([PLAIN])
    text = f"before {encode(PLAIN)} after, and then some more\n" * 12
    whole = masker.mask_text(text)
    for step in steps:
        assert masked_in_pieces(masker, text, step) == whole, step


@pytest.mark.parametrize(
    "text",
    [
        "ghp 0123456789 abcdef ABCDEF",
        "ghp_0123 456789abc defABCDEF",
        "67 68 70 5f 30",
        "%67%68%70 \\x67 &amp; 100%",
        "a3142f3 Hosts are put into their control group\nd0ad343 Files of the home",
    ],
)
def test_similar_text_is_left_alone(text: str) -> None:
    assert Masker([PLAIN]).mask_text(text) == text


def test_what_is_found_lies_within_the_reach() -> None:
    masker = Masker([PLAIN])
    spread = (" " * 200).join(PLAIN)
    assert masker.mask_text(spread) == spread


def traces(secret: str) -> list[str]:
    """Return the forbidden traces: any eight characters in a row of the plainest forms."""
    raw = secret.encode()
    whole = [secret, secret[::-1], raw.hex(), raw.hex().upper()]
    return [text[at : at + 8] for text in whole for at in range(len(text) - 7)]


@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize("secret", [SECRET, PLAIN, SIGNS])
def test_every_form_is_found(secret: str, encode: object) -> None:
    encoded = encode(secret)
    masked = Masker([secret]).mask_text(f"before {encoded} after")
    assert MASK in masked
    assert masked.startswith("before ")
    assert masked.endswith(" after")
    assert not [trace for trace in traces(secret) if trace in masked.replace("\n", "")]
    for candidate in masked.replace(MASK, " ").split():
        for padding in ("", "=", "=="):
            try:
                decoded = base64.b64decode(candidate + padding, altchars=b"-_", validate=True)
            except ValueError:
                continue
            assert secret[2:-2].encode() not in decoded


VISIBLE = st.characters(categories=["L", "N", "P", "S"])


@given(
    st.text(VISIBLE, min_size=8, max_size=40),
    st.sampled_from([name for name in ENCODINGS if not name.startswith(("bash", "lower case", "wrapped"))]),
)
@example("C:\\key\\$(x)`y`", "JavaScript's json of json")
def test_whatever_the_secret_is_its_forms_are_found(secret: str, name: str) -> None:
    encoded = ENCODINGS[name](secret)
    masked = Masker([secret]).mask_text(f"before {encoded} after")
    assert MASK in masked
    assert encoded not in masked or encoded in MASK
    assert secret not in masked.replace(MASK, "")


@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)
def test_cut_at_every_place(encode: object) -> None:
    masker = Masker([SECRET, PLAIN])
    text = f"before {encode(SECRET)} between {encode(PLAIN)} after, with a tail that is long enough to be shown" * 2
    whole = masker.mask_text(text)
    for cut in range(len(text) + 1):
        pieces = MaskedPieces(masker)
        assert pieces.feed(text[:cut]) + pieces.feed(text[cut:]) + pieces.finish() == whole
    assert masked_in_pieces(masker, text, 1) == whole


@given(st.lists(st.sampled_from([SECRET, PLAIN, SECRET[:7], "\n", "text ", PLAIN[::-1], TRUNCATION_MARKER])), st.data())
def test_pieces_are_masked_like_the_whole(parts: list[str], data: st.DataObject) -> None:
    masker, text = Masker([SECRET, PLAIN]), "".join(parts)
    pieces, shown, at = MaskedPieces(masker), "", 0
    while at < len(text):
        step = data.draw(st.integers(1, 40))
        shown += pieces.feed(text[at : at + step])
        at += step
    assert shown + pieces.finish() == masker.mask_text(text)


@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)
def test_value_containing_a_cut_is_found_in_pieces(encode: Callable[[str], str]) -> None:
    masker, encoded = Masker([PLAIN]), encode(PLAIN)
    tail = "what is shown behind it, " * (1 + masker.reach_chars // 12)
    at = len(encoded) // 2
    for cut in CUT_MARKERS:
        text = f"before {encoded[:at]}{cut}{encoded[at:]} {tail}"
        whole = masker.mask_text(text)
        for step in (60, 1_000):
            assert masked_in_pieces(masker, text, step) == whole, (cut, step)


@pytest.mark.parametrize("cut", CUT_MARKERS)
def test_start_of_a_value_waits_for_the_whole_cut_mark(cut: str) -> None:
    masker = Masker(["'" * 60])
    wrapped = "\r\n".join(max(find_forms("'" * 60), key=len)[:-1])  # as far as a value reaches
    text = f"before\n{wrapped}{cut}what follows"
    at = text.index(cut) + len(cut) - 1
    pieces = MaskedPieces(masker)
    assert pieces.feed(text[:at]) + pieces.feed(text[at:]) + pieces.finish() == masker.mask_text(text)


@given(st.text(), st.text(min_size=8))
def test_masking_twice_changes_nothing_more(text: str, secret: str) -> None:
    masker = Masker([secret])
    once = masker.mask_text(text + secret + text)
    assert masker.mask_text(once) == once or secret in MASK * 3


@given(st.text(st.characters(max_codepoint=0x2FF), max_size=200))
def test_a_text_without_a_secret_is_left_as_it_is(text: str) -> None:
    assert Masker([SECRET]).mask_text(text) == text


def test_short_values_are_not_looked_for() -> None:
    masker = Masker(["", "1234567"])
    assert not masker
    assert masker.mask_text("1234567") == "1234567"


def test_multiline_key_is_found_by_each_line() -> None:
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC\n-----END KEY-----\n"
    masked = Masker([key]).mask_text("found MIIEvQIBADANBgkq and -----BEGIN KEY-----")
    assert masked == f"found {MASK} and -----BEGIN KEY-----"


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_short_lines_are_found_together(ends: str) -> None:
    masker = Masker(["user\n\nword\nlast"])
    assert masker.mask_text(f"it is user{ends}{ends}word{ends}last{ends}it was") == f"it is {MASK}{ends}it was"
    assert masker.mask_text("user word last") == "user word last"


def test_events_are_masked_except_in_pictures() -> None:
    masker = Masker([PLAIN])
    picture = base64.b64encode(PLAIN.encode()).decode()
    masked = masker.mask_wire(
        {
            "content": f"a {PLAIN}",
            "arguments": {"list": [1, None, {PLAIN: [f"{PLAIN}!"]}]},
            "screenshot": picture,
            "image_urls": [f"data:image/png;base64,{picture}", f"https://host/?{PLAIN}"],
        }
    )
    assert masked == {
        "content": f"a {MASK}",
        "arguments": {"list": [1, None, {MASK: [f"{MASK}!"]}]},
        "screenshot": picture,
        "image_urls": [f"data:image/png;base64,{picture}", f"https://host/?{MASK}"],
    }


@pytest.mark.parametrize("cut", [TRUNCATION_MARKER, "<response clipped><NOTE>"])
@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)
def test_value_cut_in_two_is_found_on_both_sides(encode: object, cut: str) -> None:
    masker = Masker([PLAIN])
    encoded = encode(PLAIN)
    for at in range(len(encoded) + 1):
        behind = encoded[at:] if cut == TRUNCATION_MARKER else "what to do"
        masked = masker.mask_text(f"before {encoded[:at]}{cut}{behind} after")
        assert not [trace for trace in traces(PLAIN) if trace in masked.replace("\n", "")]
        assert masked.startswith("before ")
        assert masked.endswith(" after")
        assert cut.strip() in masked
    assert masker.mask_text(f"ghp{cut}after") == f"ghp{cut}after"  # too little to tell


def test_an_empty_line_ends_what_was_wrapped() -> None:
    masker = Masker([PLAIN])
    assert masker.mask_text(f"{PLAIN[:9]}\n{PLAIN[9:]}") == MASK
    assert masker.mask_text(f"{PLAIN[:9]}\n\n{PLAIN[9:]}") == f"{PLAIN[:9]}\n\n{PLAIN[9:]}"


def test_two_secrets_that_overlap_are_one_mask() -> None:
    assert Masker(["abcdefgh12", "gh12345678"]).mask_text("xabcdefgh12345678x") == f"x{MASK}x"
