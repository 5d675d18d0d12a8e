"""Events to bytes and back.

An entry is one byte of schema version, one of flags (1: zstd), four of CRC-32 over the payload, then the payload:
the event's wire form in msgpack, compressed when larger than 1 KiB.

Holds: whatever `encode` made, every later version decodes; a flipped bit is found; hostile bytes raise `CorruptEntry`
and nothing else; lone surrogates are replaced once, here, at the edge.
Does not: know pickles, extension types or a fallback decoder.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import pydantic
import zstandard

import broker.actions
import broker.observations  # noqa: F401  (both enter their classes into the table of kinds)
from broker.errors import CorruptEntry, StoreTooNew, UnknownKind
from broker.events import Event

SCHEMA_VERSION = 1
COMPRESS_ABOVE_BYTES = 1024
SHORTEN_ABOVE_BYTES = 32 * 1024
SHORTENED_END_CHARS = 7_500
MAX_PAYLOAD_BYTES = 1 << 20
MAX_DEPTH = 32

_HEADER_BYTES = 6
_ZSTD = 1

Wire = dict[str, Any]
Upcaster = Callable[[Wire], Wire]

UPCASTERS: Mapping[int, Upcaster] = {}
"""From schema version n to n + 1, by n."""

_compressor = zstandard.ZstdCompressor(level=1)
_decompressor = zstandard.ZstdDecompressor()


def encode(wire: Wire) -> bytes:
    """Turn an event's wire form into the bytes of an entry.

    Raises:
        ValueError: larger than 1 MiB even after `shorten`.
    """
    try:
        payload: bytes = msgpack.packb(wire)
    except UnicodeEncodeError:
        payload = msgpack.packb(replace_surrogates(wire))
    flags = 0
    if len(payload) > COMPRESS_ABOVE_BYTES:
        flags, payload = _ZSTD, _compressor.compress(payload)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"An event of kind {wire.get('kind')!r} is {len(payload)} bytes; the limit is 1 MiB.")
    return bytes((SCHEMA_VERSION, flags)) + zlib.crc32(payload).to_bytes(4, "big") + payload


def decode_wire(entry: bytes, *, upcasters: Mapping[int, Upcaster] = UPCASTERS, current: int = SCHEMA_VERSION) -> Wire:
    """Turn an entry's bytes into the wire form of today.

    Raises:
        CorruptEntry: checksum, bounds or structure do not hold.
        StoreTooNew: written by a newer version.
    """
    if len(entry) < _HEADER_BYTES:
        raise CorruptEntry(f"An entry of {len(entry)} bytes is too short to be an event.")
    version, flags = entry[0], entry[1]
    payload = entry[_HEADER_BYTES:]
    if zlib.crc32(payload) != int.from_bytes(entry[2:_HEADER_BYTES], "big"):
        raise CorruptEntry("An entry does not match its checksum.")
    if version > current:
        raise StoreTooNew(
            f"An event was written with schema version {version}; this version of Deckhands reads up to {current}.",
            remedy="Upgrade Deckhands on this machine.",
        )
    try:
        if flags & _ZSTD:
            payload = _decompressor.decompress(payload, max_output_size=16 * MAX_PAYLOAD_BYTES)
        wire: Any = msgpack.unpackb(payload, ext_hook=_refuse_extension)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException, zstandard.ZstdError) as error:
        raise CorruptEntry(f"An entry cannot be unpacked: {error}") from error
    if not isinstance(wire, dict):
        raise CorruptEntry(f"An entry holds a {type(wire).__name__}, not an event.")
    upcast: Wire = wire
    for step in range(version, current):
        upcast = upcasters[step](upcast)
    return upcast


def event_from_wire(wire: Wire, event_id: int) -> Event:
    """Build an event from its wire form.

    Raises:
        UnknownKind: no class has this kind.
        CorruptEntry: a field is missing or does not fit.
    """
    kind = wire.get("kind")
    event_class = Event.KINDS.get(kind) if isinstance(kind, str) else None
    if event_class is None:
        raise UnknownKind(f"Event {event_id} is of the kind {kind!r}, which this version does not know.")
    try:
        event = event_class.model_validate(wire)
    except pydantic.ValidationError as error:
        raise CorruptEntry(f"Event {event_id} ({kind}) does not fit its schema: {error}") from error
    object.__setattr__(event, "id", event_id)  # a copy of a frozen model costs more than the decoding
    return event


def decode(entry: bytes, event_id: int) -> Event:
    """Turn an entry's bytes into an event; see `decode_wire` and `event_from_wire` for what is raised."""
    return event_from_wire(decode_wire(entry), event_id)


def shorten(wire: Wire) -> tuple[Wire, dict[str, bytes]]:
    """Move the large texts of an event that is too large for the log into blobs.

    Args:
        wire: an event's wire form; not changed.

    Returns:
        The wire form to store, and blobs by their SHA-256. Shortened fields keep head and tail and are named in
        `blobs` by their dotted path. An event of up to 32 KiB comes back as it is, with no blobs.
    """
    total = _text_bytes(wire)
    if total <= SHORTEN_ABOVE_BYTES:
        return wire, {}
    wire = replace_surrogates(wire)
    texts = sorted(_texts(wire, ""), key=lambda item: -len(item[1]))
    refs: dict[str, dict[str, Any]] = {}
    contents: dict[str, bytes] = {}
    for path, text in texts:
        if total <= SHORTEN_ABOVE_BYTES or len(text) <= 2 * SHORTENED_END_CHARS + 100:
            break
        content = text.encode()
        sha256 = hashlib.sha256(content).hexdigest()
        left_out = len(text) - 2 * SHORTENED_END_CHARS
        marker = f"\n[... {left_out} characters left out; the whole is kept beside the log ...]\n"
        _put(wire, path, text[:SHORTENED_END_CHARS] + marker + text[-SHORTENED_END_CHARS:])
        contents[sha256] = content
        refs[path] = {"sha256": sha256, "size_bytes": len(content)}
        total -= left_out
    return (wire | {"blobs": refs} if refs else wire), contents


def restore(wire: Wire, contents: Mapping[str, bytes]) -> Wire:
    """Undo `shorten`: put the blobs' texts back where they were.

    Raises:
        CorruptEntry: a blob is missing or is not what its address says.
    """
    refs = wire.get("blobs")
    if not refs:
        return wire
    wire = replace_surrogates({key: value for key, value in wire.items() if key != "blobs"})
    for path, ref in refs.items():
        content = contents.get(ref["sha256"])
        if content is None or hashlib.sha256(content).hexdigest() != ref["sha256"]:
            raise CorruptEntry(f"The blob of the field {path!r} is missing or damaged.")
        _put(wire, path, content.decode())
    return wire


def replace_surrogates(value: Any) -> Any:
    """Copy JSON values, replacing lone surrogates by U+FFFD."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_surrogates(item) for item in value]
    return value


def _texts(value: Any, path: str) -> list[tuple[str, str]]:
    if isinstance(value, str):
        return [(path, value)] if len(value) > 2 * SHORTENED_END_CHARS else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, child in children for found in _texts(child, f"{path}.{key}" if path else str(key))]


def _text_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict):
        return sum(_text_bytes(child) for child in value.values())
    if isinstance(value, list):
        return sum(_text_bytes(child) for child in value)
    return 8


def _put(wire: Any, path: str, text: str) -> None:
    *parents, last = path.split(".")
    for key in parents:
        wire = wire[int(key)] if isinstance(wire, list) else wire[key]
    wire[int(last) if isinstance(wire, list) else last] = text


def _refuse_extension(code: int, _: bytes) -> Any:
    raise ValueError(f"extension type {code} is not allowed")
