"""Encrypts the members of an archived file in frames, so that a long log is never whole in memory.

    frame    four bytes of length, then a piece of the content of up to 1 MiB: compressed, then encrypted

Holds: a frame is authenticated with the name of its member, its number, and whether it is the last one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from broker.runtime import CorruptEntry
from broker.store import Cipher

PLAIN_BYTES = 2**20
LENGTH_BYTES = 4
MAX_FRAME_BYTES = PLAIN_BYTES + 4_096


def encrypt_pieces(cipher: Cipher, name: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the frames of a member's content."""
    for number, (piece, is_last) in enumerate(_mark_last(_regroup(pieces)), 1):
        sealed = cipher.encrypt(zlib.compress(piece), _describe(name, number, is_last=is_last))
        yield len(sealed).to_bytes(LENGTH_BYTES, "big") + sealed


def decrypt_pieces(cipher: Cipher, name: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the content of a member.

    Raises:
        CorruptEntry: it was changed or cut off, or encrypted with another key.
    """
    number = 0
    for number, (sealed, is_last) in enumerate(_mark_last(_split(name, pieces)), 1):
        packed = cipher.decrypt(sealed, _describe(name, number, is_last=is_last))
        unpack = zlib.decompressobj()
        yield unpack.decompress(packed, PLAIN_BYTES)
        if not unpack.eof:
            raise CorruptEntry(f"A frame of {name} is larger than any.")
    if not number:
        raise CorruptEntry(f"{name} has no frame.")


def _regroup(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield pieces of up to 1 MiB, at least one: an empty member has a frame, too."""
    rest = bytearray()
    for piece in pieces:
        rest += piece
        while len(rest) > PLAIN_BYTES:
            yield bytes(rest[:PLAIN_BYTES])
            del rest[:PLAIN_BYTES]
    yield bytes(rest)


def _split(name: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
    rest = bytearray()
    for piece in pieces:
        rest += piece
        while len(rest) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(rest[:LENGTH_BYTES], "big")
            if end > MAX_FRAME_BYTES:
                raise CorruptEntry(f"A frame of {name} is larger than any.")
            if len(rest) < end:
                break
            yield bytes(rest[LENGTH_BYTES:end])
            del rest[:end]
    if rest:
        raise CorruptEntry(f"{name} does not end with a whole frame.")


def _mark_last(pieces: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    waiting: bytes | None = None
    for piece in pieces:
        if waiting is not None:
            yield waiting, False
        waiting = piece
    if waiting is not None:
        yield waiting, True


def _describe(name: str, number: int, *, is_last: bool) -> str:
    return f"archive {name} {number}{' last' if is_last else ''}"
