"""The codec: events to bytes and back.

An entry is one byte of schema version, one byte of flags (1: zstd, 2: zstd with the dictionary `events.zdict`), four
bytes of CRC-32 over the rest of the entry, and the payload: the event's wire form in msgpack, compressed unless it is
tiny. An entry of the version 255 is encrypted: its payload is a whole entry, encrypted by a cipher of its conversation.
A small event consists mostly of field names and of a prompt that many conversations share; the dictionary contains
both. `benchmarks/entry_dictionary.py` trains the dictionary.

Holds: every later version decodes the output of `encode`. A flipped bit is detected. Hostile bytes raise
`CorruptEntry`, `StoreTooNew` or `UnknownKind` and cost at most 16 MiB. Lone surrogates are replaced once, here, at the
edge.
Does not: support pickle, msgpack extension types or a fallback decoder.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgpack
import pydantic
import zstandard

import broker.contract
from broker.contract.events import Action, Event, JsonObject
from broker.contract.kinds import Paragraph
from broker.contract.plain_json import replace_surrogates
from broker.contract.schema_version import SCHEMA_VERSION
from broker.runtime import CorruptEntry, DataLocked, EventUnfit, StoreTooNew, UnknownKind, import_modules

COMPRESS_ABOVE_BYTES = 64
SHORTEN_ABOVE_BYTES = 32 * 1024
SHORTENED_END_CHARS = 7_500
MAX_ENTRY_BYTES = 1 << 20
MAX_UNPACKED_BYTES = 16 << 20
REPEATED_CACHE_SIZE = 128
REPEATED_LIMIT_BYTES = 32 * 1024
"""The size limit of a cached value that many conversations share; all cached values together take at most 4 MiB
packed."""

_TIME: pydantic.TypeAdapter[datetime] = pydantic.TypeAdapter(datetime)
_HEADER_BYTES = 6
ENCRYPTED_VERSION = 255
"""Marks an encrypted entry where others have their schema version. Earlier versions of Deckhands take it for a newer
one, and leave the conversation to another worker."""
_AT_POSITION = 1
"""Flag of an encrypted entry: the id of the event is authenticated with it. A writer that does not know the id, because
the store assigns it, leaves this out."""
_ZSTD = 1
_ZSTD_DICTIONARY = 2
_LEVEL = 1

Wire = dict[str, Any]


class EntryCipher(Protocol):
    """Encrypts the entries of one conversation; see `broker.store.Cipher`."""

    def encrypt(self, content: bytes, about: str) -> bytes:
        """Encrypt content, bound to its description `about`."""

    def decrypt(self, sealed: bytes, about: str) -> bytes:
        """Decrypt content; raises CorruptEntry."""


Upcaster = Callable[[Wire], Wire]
Decoder = Callable[[bytes, int], Event]

UPCASTERS: Mapping[int, Upcaster] = {1: lambda wire: wire}
"""Functions from schema version n to n + 1, by n."""


class UnknownEvent(Event):
    """An event whose kind or schema version is unknown to this version. Used only to show and export logs.

    A worker that reads such an event leaves the conversation to a newer worker.

    Attributes:
        fields: its unchanged wire form, so that an export loses nothing.
    """

    is_shown_to_users: ClassVar[bool] = True

    fields: JsonObject

    def wire(self) -> JsonObject:
        """Return the fields as they were written."""
        return {"kind": self.kind, "source": self.source.value} | self.fields

    @property
    def sentence(self) -> str:
        """A one-line summary for users."""
        return f"An event of the kind {self.kind}, which this version of Deckhands does not know."

    @property
    def paragraphs(self) -> tuple[Paragraph, ...]:
        """See `Event.paragraphs`."""
        return (Paragraph(f"[{self.id}] {self.sentence}", "detail"),)


class _Zstd(threading.local):
    """The compressors of a thread. They are not thread-safe and too expensive to create for each event."""

    def __init__(self) -> None:
        dictionary = load_dictionary()
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL, dict_data=dictionary, write_dict_id=False)
        self.decompressors = {
            _ZSTD: zstandard.ZstdDecompressor(),
            _ZSTD_DICTIONARY: zstandard.ZstdDecompressor(dict_data=dictionary),
        }


@cache
def load_dictionary() -> zstandard.ZstdCompressionDict:
    """Return the dictionary of small events."""
    found = zstandard.ZstdCompressionDict(Path(__file__).with_name("events.zdict").read_bytes())
    found.precompute_compress(level=_LEVEL)
    return found


_zstd = _Zstd()


def to_entry(wire: Wire) -> tuple[bytes, dict[str, bytes]]:
    """Encode an event's wire form as an entry and its blobs; see `shorten` and `encode`."""
    packed = pack(wire)
    if len(packed) <= SHORTEN_ABOVE_BYTES:  # most events: packed once, without walking through the values
        return _seal(packed, SCHEMA_VERSION), {}
    wire, contents = shorten(wire)
    return encode(wire), contents


def encode(wire: Wire, *, schema_version: int = SCHEMA_VERSION) -> bytes:
    """Encode an event's wire form as an entry.

    Raises:
        EventUnfit: larger than 1 MiB (compressed) or 16 MiB, nested too deeply, or with numbers beyond 64 bits.
    """
    return _seal(pack(wire), schema_version)


def pack(wire: Wire) -> bytes:
    """Encode an event's wire form as msgpack.

    Raises:
        EventUnfit: larger than 16 MiB, nested too deeply, or with numbers beyond 64 bits.
    """
    try:
        try:
            packed: bytes = msgpack.packb(wire)
        except UnicodeEncodeError:
            packed = msgpack.packb(replace_surrogates(wire))
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise EventUnfit(f"An event of the kind {wire.get('kind')!r} cannot be stored: {error}.") from error
    if len(packed) > MAX_UNPACKED_BYTES:
        raise EventUnfit(f"An event of the kind {wire.get('kind')!r} has {len(packed)} bytes; the limit is 16 MiB.")
    return packed


def _seal(payload: bytes, schema_version: int) -> bytes:
    flags = 0
    if len(payload) > COMPRESS_ABOVE_BYTES:
        flags = _ZSTD_DICTIONARY
        payload = _zstd.compressor.compress(payload)
    if len(payload) > MAX_ENTRY_BYTES:
        raise EventUnfit(f"An event has {len(payload)} bytes even when compressed; the limit is 1 MiB.")
    return _add_head(payload, schema_version, flags)


def _add_head(payload: bytes, version: int, flags: int) -> bytes:
    head = bytes((version, flags))
    return head + zlib.crc32(payload, zlib.crc32(head)).to_bytes(4, "big") + payload


def is_encrypted(entry: bytes) -> bool:
    """Return whether an entry is encrypted."""
    return entry[:1] == b"\xff"


def find_sealed_part(entry: bytes) -> bytes:
    """Return the ciphertext of an encrypted entry; it starts with the id of the key."""
    return entry[_HEADER_BYTES:]


def encrypt_entry(entry: bytes, cipher: EntryCipher, event_id: int | None) -> bytes:
    """Encrypt an entry.

    Args:
        event_id: the id that the event will have; None if the store assigns it.
    """
    flags = 0 if event_id is None else _AT_POSITION
    return _add_head(cipher.encrypt(entry, _describe_entry(flags, event_id)), ENCRYPTED_VERSION, flags)


def find_key_id(entry: bytes, size: int) -> bytes | None:
    """Return the key id, `size` bytes long, of an encrypted entry; None if the entry is not encrypted."""
    return find_sealed_part(entry)[:size] if is_encrypted(entry) else None


def decrypt_entry(entry: bytes, cipher: EntryCipher | None, event_id: int) -> bytes:
    """Decrypt an entry. An unencrypted entry is returned unchanged, unless its conversation has a cipher.

    Raises:
        CorruptEntry: it was changed or moved, or is not encrypted although its conversation is.
        DataLocked: it is encrypted, and there is no cipher.
    """
    if not is_encrypted(entry):
        if cipher is not None:
            raise CorruptEntry("An entry of an encrypted conversation is not encrypted.")
        return entry
    if cipher is None:
        raise DataLocked("An entry is encrypted.", remedy="Set DECKHANDS_MASTER_KEYS or DECKHANDS_MASTER_KEYS_FILE.")
    if len(entry) < _HEADER_BYTES or entry[1] not in (0, _AT_POSITION):
        raise CorruptEntry("An encrypted entry has a damaged head.")
    return cipher.decrypt(entry[_HEADER_BYTES:], _describe_entry(entry[1], event_id))


def _describe_entry(flags: int, event_id: int | None) -> str:
    return f"event {event_id}" if flags & _AT_POSITION else "an event"


def checksum_of(entry: bytes) -> str:
    """Return an entry's checksum in hex. It distinguishes an event from a later one with the same id."""
    return entry[2:_HEADER_BYTES].hex()


def decode_wire(entry: bytes, *, upcasters: Mapping[int, Upcaster] = UPCASTERS, current: int = SCHEMA_VERSION) -> Wire:
    """Decode an entry to the current wire form.

    Raises:
        CorruptEntry: the checksum, a bound or the structure is invalid.
        StoreTooNew: a newer version wrote the entry.
    """
    if len(entry) < _HEADER_BYTES:
        raise CorruptEntry(f"An entry of {len(entry)} bytes is too short to be an event.")
    version, flags = entry[0], entry[1]
    payload = entry[_HEADER_BYTES:]
    if zlib.crc32(payload, zlib.crc32(entry[:2])) != int.from_bytes(entry[2:_HEADER_BYTES], "big"):
        raise CorruptEntry("An entry does not match its checksum.")
    if version == ENCRYPTED_VERSION:
        raise DataLocked("An entry is encrypted.", remedy="Set DECKHANDS_MASTER_KEYS or DECKHANDS_MASTER_KEYS_FILE.")
    if version > current:
        raise StoreTooNew(
            f"An event was written with schema version {version}; this version of Deckhands reads up to {current}.",
            remedy="Upgrade Deckhands on this machine.",
        )
    if version < 1 or flags not in (0, _ZSTD, _ZSTD_DICTIONARY):
        raise CorruptEntry(f"An entry claims schema version {version} and flags {flags}, which never existed.")
    try:
        wire: Any = _unpack(payload, flags)
        if not isinstance(wire, dict):
            raise CorruptEntry(f"An entry holds a {type(wire).__name__}, not an event.")
        for step in range(version, current):
            wire = upcasters[step](wire)
    except (LookupError, ValueError, TypeError, msgpack.UnpackException, zstandard.ZstdError) as error:
        raise CorruptEntry(f"An entry cannot be unpacked: {error}") from error
    found: Wire = wire
    return found


def _unpack(payload: bytes, flags: int) -> Any:
    if flags:
        # The frame declares its own size. Without this check, a few bytes could allocate all memory.
        if not 0 <= zstandard.frame_content_size(payload) <= MAX_UNPACKED_BYTES:
            raise CorruptEntry("An entry claims to be larger than any event.")
        payload = _zstd.decompressors[flags].decompress(payload)
    return msgpack.unpackb(payload, ext_hook=_refuse_extension)


def event_from_wire(wire: Wire, event_id: int) -> Event:
    """Build an event from its wire form.

    Raises:
        UnknownKind: no class has this kind.
        CorruptEntry: a field is missing or invalid.
    """
    kind = wire.get("kind")
    event_class = (Event.KINDS.get(kind) or find_kinds().get(kind)) if isinstance(kind, str) else None
    if event_class is None:
        raise UnknownKind(f"Event {event_id} is of the kind {kind!r}, which this version does not know.")
    try:
        event: Event = event_class.__pydantic_validator__.validate_python(_share_repeated(event_class, wire))
    except pydantic.ValidationError as error:
        raise CorruptEntry(f"Event {event_id} ({kind}) does not fit its schema: {error}") from error
    object.__setattr__(event, "id", event_id)  # copying a frozen model is slower than decoding it
    return event


def _share_repeated(event_class: type[Event], wire: Wire) -> Wire:
    """Replace the `repeated_fields` of a wire form by cached models, shared by all equal values."""
    if not event_class.repeated_fields:
        return wire
    built = {}
    for name in event_class.repeated_fields:
        # the validator reports invalid values
        with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
            packed: bytes = msgpack.packb(wire[name]) if name in wire else b""
            if 0 < len(packed) <= REPEATED_LIMIT_BYTES:
                built[name] = _build_repeated(event_class, name, packed)
    return {**wire, **built} if built else wire


@lru_cache(maxsize=REPEATED_CACHE_SIZE)
def _build_repeated(event_class: type[Event], name: str, packed: bytes) -> Any:
    field: Any = event_class.model_fields[name].annotation
    return field.model_validate(msgpack.unpackb(packed))


def decode(entry: bytes, event_id: int) -> Event:
    """Decode an entry to an event; raises the errors of `decode_wire` and `event_from_wire`."""
    return event_from_wire(decode_wire(entry), event_id)


def decode_any(entry: bytes, event_id: int) -> Event:
    """Decode an entry to an event, or to an `UnknownEvent` if a newer version wrote it.

    Raises:
        CorruptEntry: the checksum, a bound or the structure is invalid.
    """
    try:
        return decode(entry, event_id)
    except (UnknownKind, StoreTooNew):
        wire = decode_wire(entry, current=max(entry[0], SCHEMA_VERSION))
    try:
        timestamp = _TIME.validate_python(wire.get("timestamp"))
    except pydantic.ValidationError:
        timestamp = None
    return UnknownEvent(id=event_id, kind=str(wire.get("kind")), timestamp=timestamp, fields=wire)


def shorten(wire: Wire) -> tuple[Wire, dict[str, bytes]]:
    """Move large texts of an oversized event into blobs.

    Args:
        wire: an event's wire form; not changed.

    Returns:
        The wire form to store, and the blobs by their SHA-256. A shortened field keeps its head and tail; `blobs` maps
        its dotted path to its blob (in a name, `.` is written `~1` and `~` is written `~0`). An event of up to 32 KiB
        is returned unchanged, without blobs.
    """
    total = _count_text_bytes(wire)
    if total <= SHORTEN_ABOVE_BYTES:
        return wire, {}
    wire = replace_surrogates(wire)
    texts = sorted(_find_texts(wire, ""), key=lambda item: -len(item[1]))
    refs: dict[str, dict[str, Any]] = {}
    contents: dict[str, bytes] = {}
    for path, text in texts:
        if total <= SHORTEN_ABOVE_BYTES or len(text) <= 2 * SHORTENED_END_CHARS + 100:
            break
        content = text.encode()
        sha256 = hashlib.sha256(content).hexdigest()
        left_out = len(text) - 2 * SHORTENED_END_CHARS
        marker = f"\n[... {left_out} characters left out; the whole is kept beside the log ...]\n"
        _put_text(wire, path, text[:SHORTENED_END_CHARS] + marker + text[-SHORTENED_END_CHARS:])
        contents[sha256] = content
        refs[path] = {"sha256": sha256, "size_bytes": len(content)}
        total -= left_out
    return (wire | {"blobs": {**(wire.get("blobs") or {}), **refs}} if refs else wire), contents


def restore(wire: Wire, contents: Mapping[str, bytes]) -> Wire:
    """Undo `shorten`: replace the shortened fields by the blobs' texts. References to binary blobs stay.

    Raises:
        CorruptEntry: a blob is missing or does not match its address.
    """
    refs = wire.get("blobs")
    if not refs:
        return wire
    binary = {path: ref for path, ref in refs.items() if is_binary(path)}
    wire = replace_surrogates({key: value for key, value in wire.items() if key != "blobs"})
    wire |= {"blobs": binary} if binary else {}
    for path, ref in refs.items():
        if path in binary:
            continue
        content = find_blob(contents, ref["sha256"], f"of the field {path!r}")
        try:
            _put_text(wire, path, content.decode())
        except (LookupError, TypeError, ValueError) as error:
            raise CorruptEntry(f"There is no field {path!r} to put a blob back into.") from error
    return wire


def find_blob(contents: Mapping[str, bytes], sha256: str, about: str) -> bytes:
    """Return the blob with this address.

    Args:
        about: what the error adds to "The blob".

    Raises:
        CorruptEntry: it is missing or does not match its address.
    """
    content = contents.get(sha256)
    if content is None or hashlib.sha256(content).hexdigest() != sha256:
        raise CorruptEntry(f"The blob {about} is missing or damaged.")
    return content


def is_binary(path: str) -> bool:
    """Return whether a blob of this name has bytes that belong to the event, not the text of a shortened field."""
    return path.startswith("@")


def _find_texts(value: Any, path: str) -> list[tuple[str, str]]:
    if isinstance(value, str):
        return [(path, value)] if len(value) > 2 * SHORTENED_END_CHARS else []
    if isinstance(value, dict):
        children: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    else:
        return []
    names = ((str(key).replace("~", "~0").replace(".", "~1"), child) for key, child in children)
    return [found for name, child in names for found in _find_texts(child, f"{path}.{name}" if path else name)]


def _count_text_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict):
        return sum(_count_text_bytes(child) for child in value.values())
    if isinstance(value, list):
        return sum(_count_text_bytes(child) for child in value)
    return 8


def _put_text(wire: Any, path: str, text: str) -> None:
    *parents, last = (name.replace("~1", ".").replace("~0", "~") for name in path.split("."))
    for key in parents:
        wire = wire[int(key)] if isinstance(wire, list) else wire[key]
    wire[int(last) if isinstance(wire, list) else last] = text


def _refuse_extension(code: int, _: bytes) -> Any:
    raise ValueError(f"extension type {code} is not allowed")


@cache
def find_kinds() -> Mapping[str, type[Event]]:
    """Return the classes of all kinds of events. `Event.KINDS` holds those that were needed so far."""
    import_modules(broker.contract)  # loading a module registers its kinds
    return Event.KINDS


def action_kinds() -> list[type[Action]]:
    """Return all actions that have their own tool."""
    return [kind for kind in find_kinds().values() if issubclass(kind, Action) and "tool_spec" in kind.__dict__]
