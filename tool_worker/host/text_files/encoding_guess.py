"""Guesses the legacy encoding of a file without a byte order mark: Chinese, Japanese, Korean, Cyrillic, or UTF-16.

Each candidate is decoded strictly and scored by the resulting characters. East Asian text mostly uses frequent
characters, which the standards group together; Cyrillic words have lower-case letters after the first one. Western
European text has single non-ASCII letters among many ASCII ones and matches no candidate.

Holds: a guessed encoding reproduces every byte of the content; a binary file is not text; the cost is a few decodings.
Does not: recognize short texts in every case, or encodings of Greek, Hebrew, Arabic, Thai and others.
"""

# Differs: OpenHands uses a statistical detector, which would be a dependency inside the sandbox. The four rules here
#   know fewer encodings and need only the standard library.

from __future__ import annotations

from itertools import pairwise

SAMPLE_BYTES = 64 * 1024
ENOUGH = 0.8
MOST_DAMAGED = 0.01
LEAST_UTF_16_BYTES = 8
LEAST_LETTERS = 4
"""Minimum number of different letters of a Cyrillic text."""
LEAST_ADJACENT = 0.6

_FREQUENT_LEADS = {
    "euc_kr": range(0xB0, 0xC9),
    "gb18030": range(0xB0, 0xD8),
    "big5": range(0xA4, 0xC7),
}
_JAPANESE_LEADS = {"cp932": (range(0x88, 0x98), range(0x81, 0x84)), "euc_jp": (range(0xB0, 0xD0), range(0xA1, 0xA6))}
_LEAST_KANA = 0.15
_LEAST_ASCII_SECONDS = 0.1
_CYRILLIC = ("cp1251", "koi8_r")


def guess_encoding(content: bytes) -> str | None:
    """Return the name of the codec, or None if no known encoding matches.

    Args:
        content: Bytes that are not UTF-8 and have no byte order mark.
    """
    if b"\0" in content[:SAMPLE_BYTES]:
        candidates = [(1.0, name) for name in ("utf_16_le", "utf_16_be") if _is_utf_16(content, name)]
    elif _adjacent_share(content[:SAMPLE_BYTES]) >= LEAST_ADJACENT:
        candidates = [(score, name) for name, score in _scores(content[:SAMPLE_BYTES]) if score >= ENOUGH]
    else:
        return None
    for _, name in sorted(candidates, key=lambda candidate: -candidate[0]):
        if decodes(content, name):
            return name
    return None


def decodes(content: bytes, name: str) -> bool:
    """Return whether a codec decodes the content and encodes it back to the same bytes."""
    try:
        return content.decode(name).encode(name) == content
    except UnicodeError:
        return False


def _adjacent_share(sample: bytes) -> float:
    """Return the share of non-ASCII bytes that are next to another one."""
    runs = sample.translate(_HIGH_OR_BLANK).split()
    total = sum(map(len, runs))
    return sum(len(run) for run in runs if len(run) > 1) / total if total else 0.0


def _is_utf_16(content: bytes, name: str) -> bool:
    """Return whether the content is UTF-16 text: printable and partly ASCII."""
    if len(content) % 2 or len(content) < LEAST_UTF_16_BYTES:
        return False
    try:
        text = content[:SAMPLE_BYTES].decode(name)
    except UnicodeDecodeError:
        return False
    shown = text.translate(_LAYOUT)
    is_ascii = sum(character < "\x80" for character in text)
    return shown.isprintable() and is_ascii >= len(text) / 20 and is_ascii > 0


def _scores(sample: bytes) -> list[tuple[str, float]]:
    scores = [(name, _score_frequent(sample, name, (leads,), kana=None)) for name, leads in _FREQUENT_LEADS.items()]
    scores += [(name, _score_frequent(sample, name, leads, kana=leads[1])) for name, leads in _JAPANESE_LEADS.items()]
    return scores + [(name, _score_cyrillic(sample, name)) for name in _CYRILLIC]


def _score_frequent(sample: bytes, name: str, leads: tuple[range, ...], kana: range | None) -> float:
    """Return the share of non-ASCII letters that are frequent in the script of an encoding."""
    text = sample.decode(name, "replace")
    letters = [character for character in text if character >= "\x80" and character.isalpha()]
    if len(set(letters)) < 2 or text.count("\ufffd") > 1 + len(text) * MOST_DAMAGED:
        return 0.0
    pairs = [encoded for encoded in (letter.encode(name, "replace") for letter in letters) if len(encoded) == 2]
    firsts = [pair[0] for pair in pairs]
    if name == "big5" and sum(pair[1] < 0x80 for pair in pairs) < _LEAST_ASCII_SECONDS * len(pairs):
        return 0.0  # only Big5 has ASCII bytes as second bytes
    if kana is not None and sum(first in kana for first in firsts) < _LEAST_KANA * len(letters):
        return 0.0
    return sum(any(first in part for part in leads) for first in firsts) / len(letters)


def _score_cyrillic(sample: bytes, name: str) -> float:
    """Return the share of lower-case letters inside words; 0 if the text is not mostly Cyrillic."""
    text = sample.decode(name, "replace")
    above = [character for character in text if character >= "\x80"]
    letters = [character for character in above if "\u0400" <= character <= "\u04ff"]
    if len(set(letters)) < LEAST_LETTERS or len(letters) < ENOUGH * len(above):
        return 0.0
    pairs = [(first, second) for first, second in pairwise(text) if "\u0400" <= second <= "\u04ff"]
    within = [second for first, second in pairs if "\u0400" <= first <= "\u04ff"]
    return sum(second.islower() for second in within) / len(within) if within else 0.0


_HIGH_OR_BLANK = bytes(number if number >= 0x80 else 0x20 for number in range(256))
_LAYOUT = dict.fromkeys(map(ord, "\t\n\r\f\v\x1b"), " ")
