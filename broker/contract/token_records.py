"""The exact tokens of a rollout's replies, as bytes.

A record has the tokens that one reply added to its segment: the new part of its prompt, then the sampled tokens, with
the log-probability and the policy version of each sampled one.

    "DTK1" | uint32 prompt tokens | uint32 sampled tokens | uint32 runs of versions | zlib of:
        int32 * prompt | int32 * sampled | float32 * sampled log-probabilities | (int32 count, int32 version) * runs

All numbers are little-endian. A run covers `count` consecutive sampled tokens; the version -1 is unknown, and a
log-probability that the server did not report is NaN.

Holds: a record is read only if its sizes agree. No size in it makes a reader allocate more than `MAX_TOKENS` need.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from broker.contract.llm_spec import EventValue
from broker.runtime import CorruptEntry

TOKENS_BLOB = "@tokens"
"""The name of the record among the blobs of a reply. Names with this first letter are bytes, not texts of a field."""
MAX_TOKENS = 1 << 24
"""The most tokens of one record."""
UNKNOWN_VERSION = -1

_MAGIC = b"DTK1"
_HEAD = struct.Struct("<4sIII")
_NUMBER_BYTES = 4


class RecordedTokens(EventValue):
    """What a reply's event says about its token record.

    Attributes:
        start: the tokens of the segment before this record; 0 starts a segment.
        prompt: new prompt tokens, which no policy sampled.
        sampled: tokens that the policy sampled.
        min_version, max_version: the oldest and the newest policy that sampled one; None: the server named none.
        messages: the messages that the prompt consisted of.
        digest: the digest of these messages and the tools.
        model: the model that sampled them, as named in the workers' settings.
    """

    start: int = 0
    prompt: int = 0
    sampled: int = 0
    min_version: int | None = None
    max_version: int | None = None
    messages: int = 0
    digest: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The tokens that one reply added.

    Attributes:
        prompt: the new prompt tokens.
        sampled: the sampled tokens; `logprobs` has one number for each.
        versions: runs of consecutive sampled tokens, as (count, version).
    """

    prompt: array[int] = field(default_factory=lambda: array("i"))
    sampled: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: tuple[tuple[int, int], ...] = ()

    def to_bytes(self) -> bytes:
        """Return the record as bytes."""
        runs = array("i", [number for run in self.versions for number in run])
        numbers: list[array[int] | array[float]] = [self.prompt, self.sampled, self.logprobs, runs]
        body = b"".join(_to_little_endian(one) for one in numbers)
        head = _HEAD.pack(_MAGIC, len(self.prompt), len(self.sampled), len(self.versions))
        return head + zlib.compress(body, 6)

    @classmethod
    def from_bytes(cls, content: bytes) -> TokenRecord:
        """Read a record.

        Raises:
            CorruptEntry: the bytes are not a record.
        """
        try:
            magic, prompt, sampled, runs = _HEAD.unpack_from(content)
        except struct.error as error:
            raise CorruptEntry("A token record is cut off.") from error
        if magic != _MAGIC or max(prompt, sampled, runs) > MAX_TOKENS:
            raise CorruptEntry("A token record has an unknown format.")
        sizes = [_NUMBER_BYTES * count for count in (prompt, sampled, sampled, 2 * runs)]
        reader = zlib.decompressobj()
        try:
            body = reader.decompress(content[_HEAD.size :], sum(sizes) + 1)
        except zlib.error as error:
            raise CorruptEntry("A token record cannot be decompressed.") from error
        if len(body) != sum(sizes) or not reader.eof:
            raise CorruptEntry("A token record does not have the size that it states.")
        parts, start = [], 0
        for size in sizes:
            parts.append(body[start : start + size])
            start += size
        numbers = _from_little_endian("i", parts[3])
        versions = tuple(zip(numbers[::2], numbers[1::2], strict=True))
        if sum(count for count, _ in versions) != sampled or any(count < 1 for count, _ in versions):
            raise CorruptEntry("The versions of a token record do not cover its sampled tokens.")
        return cls(
            _from_little_endian("i", parts[0]),
            _from_little_endian("i", parts[1]),
            _from_little_endian("f", parts[2]),
            versions,
        )

    def find_version_bounds(self) -> tuple[int, int] | None:
        """Return the oldest and the newest known version; None: there is none."""
        known = [version for _, version in self.versions if version != UNKNOWN_VERSION]
        return (min(known), max(known)) if known else None


def to_runs(versions: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the version of each token as runs."""
    runs: list[tuple[int, int]] = []
    for version in versions:
        if runs and runs[-1][1] == version:
            runs[-1] = (runs[-1][0] + 1, version)
        else:
            runs.append((1, version))
    return tuple(runs)


def _to_little_endian(numbers: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def _from_little_endian(code: str, content: bytes) -> array:  # type: ignore[type-arg]
    found: array = array(code, content)  # type: ignore[type-arg]
    if sys.byteorder == "big":
        found.byteswap()
    return found
