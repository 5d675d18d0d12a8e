"""The file of one archived conversation: a ZIP file of JSON and texts. docs/archive.md describes it.

    events.jsonl        the log, one line per event, as `deckhands export` writes it
    blobs/<sha256>      large texts that events refer to
    uploads/<sha256>    the file that the workspace started with
    summary.json        as `deckhands show --json` prints it
    manifest.json       the conversation's data, and the size and the SHA-256 of every other member

Members are encrypted in frames, so that a long log is never completely in memory.

    frame    four bytes of length, then a piece of the content of up to 1 MiB: compressed, then encrypted

Holds: content is checked against the manifest before it is used; a search checks a log while it reads it. A file is
untrusted input: names, sizes and structure are checked, and nothing is unpacked beyond its stated size. The other
members of a file with a data key are encrypted: `encrypted_members`. Sizes and checksums are those of the stored,
possibly encrypted members. A frame is authenticated with the name of its member, its number, and whether it is the last
one.
Does not: authenticate the writer of a file; checksums find damage, not forgery.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Literal, cast

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from broker.contract import SCHEMA_VERSION, Event, codec
from broker.log import render_event_line
from broker.runtime import CorruptEntry, DataLocked, EventUnfit
from broker.store import Cipher
from deckhands.client.archive.storage import CorruptArchive, TooLargeToArchive

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


EVENTS, SUMMARY, MANIFEST = "events.jsonl", "summary.json", "manifest.json"
BLOBS, UPLOADS = "blobs/", "uploads/"
MAX_FILE_BYTES = 2 * 2**30
MAX_EVENTS_BYTES = 512 * 2**20
MAX_MEMBER_BYTES = 64 * 2**20
MAX_TOTAL_BYTES = 4 * 2**30
MAX_MEMBERS = 50_000
MAX_DIRECTORY_BYTES = 16 * 2**20
"""The limit of the list of members at the end of a file: about 150 bytes for each of `MAX_MEMBERS`."""
MAX_LINE_BYTES = 64 * 2**20
PIECE_BYTES = 2**20
_NAME = re.compile(r"events\.jsonl|summary\.json|manifest\.json|(blobs|uploads)/[0-9a-f]{64}")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_KINDS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
_ENCRYPTED = 0x1


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class ArchiveMember(_Frozen):
    """One member: its uncompressed size, and its SHA-256."""

    size_bytes: int = Field(ge=0, alias="bytes")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class SummaryNumbers(_Frozen):
    """The fields of a summary that a listing needs."""

    iterations: int = Field(default=0, ge=0)
    cost_usd: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    has_unknown_cost: bool = False


class Manifest(_Frozen):
    """The description of an archived conversation.

    Attributes:
        schema_version: the version of the events.
        first_sha256: the SHA-256 of the first line of the log; it distinguishes conversations with the same id.
        archived, created, updated: when it was archived, created, and last continued.
        checkpoint: the location of workspace checkpoints, under the conversation's id; empty: there is none.
        data_key: the id of the key that encrypts the other members; empty if none does. An encrypted file has no title
            in its manifest.
        numbers: the numbers of the summary, if the file is encrypted.
        delegates: the delegates that ended with an observation in this log; each has its own file.
    """

    format: Literal["deckhands-archive"] = "deckhands-archive"
    version: Literal[1, 2] = 1
    schema_version: int = Field(ge=1)
    conversation_id: str
    last_event_id: int = Field(ge=1)
    first_sha256: str
    archived: AwareDatetime
    created: AwareDatetime | None
    updated: AwareDatetime | None
    state: str
    title: str = ""
    tenant: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    parent: str = ""
    forked_from: str = ""
    delegates: tuple[str, ...] = ()
    checkpoint: str = ""
    data_key: str = ""
    numbers: SummaryNumbers | None = None
    members: dict[str, ArchiveMember]


class FileWriter:
    """Writes the members of a file, and records their sizes and checksums.

    Args:
        cipher: encrypts all members but the manifest; None for a plain file.
    """

    def __init__(self, file: BinaryIO, cipher: Cipher | None = None) -> None:
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED)
        self.cipher = cipher
        self.members: dict[str, ArchiveMember] = {}
        self.first_sha256 = ""

    def add_events(self, events: Iterable[Event]) -> None:
        """Add the log."""
        self._write(EVENTS, self._render_lines(events))

    def add(self, name: str, content: bytes) -> None:
        """Add any other member."""
        if len(content) > MAX_MEMBER_BYTES:
            raise TooLargeToArchive(f"{name} has {len(content):,} bytes; the limit is {MAX_MEMBER_BYTES:,}.")
        self._write(name, [content])

    def finish(self, manifest: Manifest) -> None:
        """Add the manifest, and finish the file."""
        text = json.dumps(manifest.model_dump(mode="json", by_alias=True), indent=1)
        self._zip.writestr(_info(MANIFEST), text.encode())
        self._zip.close()

    def close(self) -> None:
        """Close a file that may be unfinished. Idempotent."""
        self._zip.close()

    def _render_lines(self, events: Iterable[Event]) -> Iterator[bytes]:
        size = 0
        for event in events:
            line = render_event_line(event).encode() + b"\n"
            if not self.first_sha256:
                cipher = self.cipher
                self.first_sha256 = hashlib.sha256(line).hexdigest() if cipher is None else cipher.digest(line)
            size += len(line)
            if size > MAX_EVENTS_BYTES:
                raise TooLargeToArchive(f"Its log has more than {MAX_EVENTS_BYTES:,} bytes.")
            yield line

    def _write(self, name: str, pieces: Iterable[bytes]) -> None:
        info, digest, size = _info(name), hashlib.sha256(), 0
        if self.cipher is not None:
            info.compress_type = zipfile.ZIP_STORED
            pieces = encrypt_pieces(self.cipher, name, pieces)
        with self._zip.open(info, "w", force_zip64=name == EVENTS) as member:
            for piece in pieces:
                digest.update(piece)
                member.write(piece)
                size += len(piece)
        self._note(name, size, digest.hexdigest())

    def _note(self, name: str, size: int, digest: str) -> None:
        self.members[name] = ArchiveMember(bytes=size, sha256=digest)
        total = sum(member.size_bytes for member in self.members.values()) if len(self.members) % 100 == 0 else 0
        if total > MAX_TOTAL_BYTES or len(self.members) >= MAX_MEMBERS:
            raise TooLargeToArchive(f"It has {len(self.members)} texts of {total:,} bytes.")


class ArchivedFile:
    """One file, open for reading.

    Args:
        cipher: decrypts the members of an encrypted file; None to read only its manifest.

    Raises:
        CorruptArchive: raised by every method: Deckhands did not write this file.
        DataLocked: from calls that read the members of an encrypted file without a cipher.
    """

    def __init__(self, file: Any, conversation_id: str, *, size_bytes: int, cipher: Cipher | None = None) -> None:
        self._cipher = cipher
        self._name = f"The archived file of {conversation_id}"
        if size_bytes > MAX_FILE_BYTES:
            raise self._corrupt(f"it has {size_bytes:,} bytes; the limit is {MAX_FILE_BYTES:,}")
        try:
            self._zip = zipfile.ZipFile(cast("BinaryIO", _LimitedFile(file)))
        except (zipfile.BadZipFile, RuntimeError, ValueError, EOFError) as error:
            raise self._corrupt(f"it is no ZIP file: {error}") from error
        except OSError as error:
            self._check_place(error)
            raise
        self._infos = self._check_infos()
        try:
            self.manifest = Manifest.model_validate_json(b"".join(self._raw(MANIFEST)))
        except (ValidationError, RecursionError) as error:
            raise self._corrupt(f"its manifest cannot be used: {_first_error(error)}") from error
        manifest = self.manifest
        if manifest.conversation_id != conversation_id:
            raise self._corrupt(f"it is that of {manifest.conversation_id[:80]!r}")
        if manifest.schema_version > SCHEMA_VERSION:
            raise self._corrupt("a newer version of Deckhands has written it; upgrade this one")
        stated = {name: member.size_bytes for name, member in manifest.members.items()}
        if stated != {name: info.file_size for name, info in self._infos.items() if name != MANIFEST}:
            raise self._corrupt("it does not have the members that its manifest names")

    def unlock(self, cipher: Cipher) -> None:
        """Decrypt the members of an encrypted file from now on."""
        self._cipher = cipher

    def check(self) -> None:
        """Read everything and compare it with the manifest."""
        for name in self.manifest.members.keys() - {EVENTS}:
            for _ in self._pieces(name):
                continue
        for _ in self.events(codec.decode):
            continue

    def events(self, decode: codec.Decoder, *, after: int = 0) -> Iterator[Event]:
        """Yield the events above `after`, in order, as the log has them: with their large texts shortened."""
        for fields in self.exported_events(after=after):
            yield self._event(fields, decode)

    def exported_events(self, *, after: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the events as `Event.export` returns them, without validating their fields."""
        for _ in self._pieces(EVENTS):  # check for damage before any content is used
            continue
        yield from self.scan_events(after=after)

    def scan_events(self, *, after: int = 0) -> Iterator[dict[str, Any]]:
        """Like `exported_events`, but reads the log once: damage may be noticed only after its last event."""
        number = 0
        for line in self._lines():
            number += 1
            if number > after:
                yield self._parse_line(line, number)
        if number != self.manifest.last_event_id:
            raise self._corrupt(f"it has {number} events; its manifest says {self.manifest.last_event_id}")

    def blobs(self, addresses: Iterable[str]) -> dict[str, bytes]:
        """Return the large texts that exist, by address."""
        return {sha: self.member(f"{BLOBS}{sha}") for sha in addresses if f"{BLOBS}{sha}" in self._infos}

    def upload(self, name: str) -> bytes:
        """Return the file that the workspace started with."""
        return self.member(f"{UPLOADS}{name}")

    def member(self, name: str) -> bytes:
        """Return a member."""
        if name not in self.manifest.members:
            raise self._corrupt(f"it has no {name[:100]!r}")
        return b"".join(self._content(name))

    def _check_infos(self) -> Mapping[str, zipfile.ZipInfo]:
        found: dict[str, zipfile.ZipInfo] = {}
        total = 0
        for info in self._zip.infolist():
            name = info.filename
            if not _NAME.fullmatch(name) or name in found:
                raise self._corrupt(f"it has a member {name[:100]!r}")
            if info.compress_type not in _KINDS or info.flag_bits & _ENCRYPTED:
                raise self._corrupt(f"its member {name} is compressed or encrypted in another way")
            limit = MAX_EVENTS_BYTES if name == EVENTS else MAX_MEMBER_BYTES
            total += info.file_size
            if info.file_size > limit or total > MAX_TOTAL_BYTES or len(found) >= MAX_MEMBERS:
                raise self._corrupt(f"it is too large at {name}")
            if info.compress_size > info.file_size + info.file_size // 100 + 1_000:  # of empty blocks, read at once
                raise self._corrupt(f"its member {name} is larger compressed than unpacked")
            found[name] = info
        if missing := {EVENTS, MANIFEST, SUMMARY} - found.keys():
            raise self._corrupt(f"it has no {min(missing)}")
        return found

    def _pieces(self, name: str) -> Iterator[bytes]:
        """Yield the content of a member; it is verified only after the last piece."""
        expected = self.manifest.members[name]
        digest = hashlib.sha256()
        size = 0
        for piece in self._raw(name):
            size += len(piece)
            digest.update(piece)
            yield piece
        if size != expected.size_bytes or digest.hexdigest() != expected.sha256:
            raise self._corrupt(f"{name} does not match its checksum")

    def _content(self, name: str) -> Iterator[bytes]:
        """Yield the content of a member, decrypted."""
        if not self.manifest.data_key:
            yield from self._pieces(name)
            return
        if self._cipher is None:
            raise DataLocked(
                f"{self._name} is encrypted, and its key is not known here.",
                remedy="Set DECKHANDS_URL to the store that has it, and DECKHANDS_MASTER_KEYS_FILE.",
            )
        try:
            yield from decrypt_pieces(self._cipher, name, self._pieces(name))
        except (CorruptEntry, zlib.error) as error:
            raise self._corrupt(f"{name} cannot be decrypted: {error}") from error

    def _raw(self, name: str) -> Iterator[bytes]:
        try:
            with self._zip.open(self._infos[name]) as member:
                while piece := member.read(PIECE_BYTES):
                    yield piece
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise self._corrupt(f"{name} cannot be read: {error}") from error
        except OSError as error:
            self._check_place(error)
            raise

    def _lines(self) -> Iterator[bytes]:
        rest = b""
        for piece in self._content(EVENTS):
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines
            if len(rest) > MAX_LINE_BYTES:
                raise self._corrupt(f"a line of its log has more than {MAX_LINE_BYTES:,} bytes")
        if rest:
            raise self._corrupt("its log does not end with a whole line")

    def _parse_line(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._corrupt(f"line {number} of its log cannot be read: {error}") from error
        if not isinstance(fields, dict) or fields.get("id") != number:
            raise self._corrupt(f"line {number} of its log is not event {number}")
        return fields

    def _event(self, fields: dict[str, Any], decode: codec.Decoder) -> Event:
        number = fields.pop("id")
        fields["cause"] = fields.pop("cause_id", None)
        wire = {name: value for name, value in fields.items() if value is not None}
        try:
            return decode(codec.encode(wire, schema_version=self.manifest.schema_version), number)
        except (ValueError, RecursionError, CorruptEntry, EventUnfit) as error:
            raise self._corrupt(f"line {number} of its log cannot be read: {error}") from error

    def _check_place(self, error: OSError) -> None:
        """Distinguish a file with an unsafe path from one that cannot be reached."""
        if error.errno == errno.EINVAL:
            raise self._corrupt("it names a place outside of itself") from error

    def _corrupt(self, why: str) -> CorruptArchive:
        return CorruptArchive(f"{self._name} cannot be used: {why}.")


class _LimitedFile:
    """A file that limits the size of a single read, because the list of members is read at once."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.seek = file.seek
        self.tell = file.tell
        self.seekable = file.seekable

    def read(self, size: int = -1) -> bytes:
        """Read from the file.

        Raises:
            BadZipFile: the read would exceed the limit.
        """
        if size <= MAX_DIRECTORY_BYTES:
            content: bytes = self._file.read(size if size >= 0 else MAX_DIRECTORY_BYTES + 1)
            if len(content) <= MAX_DIRECTORY_BYTES:
                return content
        raise zipfile.BadZipFile(f"its directory has more than {MAX_DIRECTORY_BYTES:,} bytes")


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def _first_error(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return type(error).__name__
