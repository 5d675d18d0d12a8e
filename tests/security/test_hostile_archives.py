"""A file in the archive is untrusted input: others with write access to the archive may forge one.

Threat: every program that can write to the archive may forge it, such as another application in the same bucket. It may
not make a reader unpack without bound, reach another path, or write anything but a conversation's log to the store.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
import zipfile
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from broker.runtime.errors import DeckhandsError, UsageError
from deckhands.client.archive.archive import Archive
from deckhands.client.archive.archived_file import MAX_DIRECTORY_BYTES, MAX_EVENTS_BYTES, MAX_MEMBER_BYTES, ArchivedFile
from deckhands.client.archive.storage import ArchiveStorage, CorruptArchive
from deckhands.client.client import Client
from tests.archive_parts import begin_ended, retired
from tests.stores import RealServer, emptied

NAME = "one-of-us"
Change = Callable[[list[Any]], list[Any]]


@pytest.fixture
async def client(valkey_server: RealServer, tmp_path: Path) -> AsyncIterator[Client]:
    """A client of a store whose one conversation is archived."""
    async with await Client.connect(await emptied(valkey_server.url)) as connected:
        client = Client(connected.store, str(tmp_path / "archive"))
        await begin_ended(client, NAME)
        await retired(client.store, tmp_path / "archive", tmp_path)
        yield client


def path_of(client: Client) -> Path:
    return Path(ArchiveStorage(client.archive.url).path(NAME))


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as found:
        return {name: found.read(name) for name in found.namelist()}


def rewrite(path: Path, contents: dict[str, bytes], *, is_honest: bool = True) -> None:
    """Write a file with a manifest that fits its members, unless it is not honest."""
    if is_honest:
        manifest = json.loads(contents["manifest.json"])
        manifest["members"] = {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in contents.items()
            if name != "manifest.json"
        }
        contents = contents | {"manifest.json": json.dumps(manifest).encode()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in contents.items():
            file.writestr(name, content)


async def refused(client: Client, *, match: str | None = None) -> None:
    """Neither reading nor restoring succeeds, and nothing is in the store."""
    with pytest.raises(DeckhandsError, match=match):
        await client.events(NAME, is_whole=True)
    with pytest.raises(DeckhandsError, match=match):
        await client.restore(NAME)
    assert await client.store.connection.call("KEYS", f"deck:*:c:{NAME}*") == []
    assert await client.recent() == []


def _observed_twice(events: list[Any]) -> list[Any]:
    (seen,) = [event for event in events if event["kind"] == "observation.run"]
    return [*events[: seen["id"]], seen | {"id": seen["id"] + 1}, *events[seen["id"] + 1 :]]


UNREADABLE: dict[str, Change] = {
    "shuffled": lambda events: [*events[:1], events[1] | {"id": 3}, *events[2:]],
    "of an unknown kind": lambda events: [*events[:2], {"id": 3, "kind": "no.such", "source": "agent"}, *events[3:]],
}
FOREIGN: dict[str, Change] = {
    "without its beginning": lambda events: [events[1] | {"id": 1}, *events[1:]],
    "begun twice": lambda events: [events[0], events[0] | {"id": 2}, *events[2:]],
    "of another conversation": lambda events: [events[0] | {"conversation_id": "another"}, *events[1:]],
    "observed twice": _observed_twice,
}


def forge(client: Client, change: Change) -> None:
    """Write the archived log again, with other events."""
    contents = members(path_of(client))
    events = change([json.loads(line) for line in contents["events.jsonl"].splitlines()])
    contents["events.jsonl"] = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    rewrite(path_of(client), contents)


@pytest.mark.parametrize("change", UNREADABLE.values(), ids=UNREADABLE)
async def test_a_log_that_cannot_be_read_is_refused(client: Client, change: Change) -> None:
    forge(client, change)
    await refused(client)


async def test_a_log_that_is_nested_without_end_is_refused(client: Client) -> None:
    contents = members(path_of(client))
    events = contents["events.jsonl"].splitlines(keepends=True)
    events[1] = b'{"id": 2, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    rewrite(path_of(client), contents | {"events.jsonl": b"".join(events)})
    await refused(client)


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
async def test_foreign_log_is_not_restored(client: Client, change: Change) -> None:
    forge(client, change)
    with pytest.raises(UsageError, match="The archived log of"):
        await client.restore(NAME)
    assert await client.recent() == []


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "blobs/../x", "events.jsonl/x", "blobs/" + "0" * 63])
async def test_a_member_of_another_name_is_refused(client: Client, name: str, tmp_path: Path) -> None:
    rewrite(path_of(client), members(path_of(client)) | {name: b"x"})
    await refused(client, match="it has a member")
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("name", ["events.jsonl", "summary.json", "manifest.json"])
async def test_a_member_that_is_missing_or_there_twice_is_refused(client: Client, name: str) -> None:
    contents = members(path_of(client))
    rewrite(path_of(client), {other: content for other, content in contents.items() if other != name}, is_honest=False)
    await refused(client, match=f"it has no {name}")
    rewrite(path_of(client), contents)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path_of(client), "a") as file:
        file.writestr(name, contents[name])
    await refused(client, match="it has a member")


async def test_content_that_differs_from_the_manifest_is_refused(client: Client) -> None:
    contents = members(path_of(client))
    for name in contents.keys() - {"manifest.json", "summary.json"}:
        spoilt = contents | {name: contents[name].replace(b"a", b"b", 1)}
        rewrite(path_of(client), spoilt, is_honest=False)
        await refused(client, match="checksum|damaged")


async def test_bombs_are_refused_before_they_are_unpacked(client: Client) -> None:
    contents = members(path_of(client))
    path = path_of(client)
    for name, limit in (("events.jsonl", MAX_EVENTS_BYTES), ("blobs/" + "0" * 64, MAX_MEMBER_BYTES)):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
            for other, content in contents.items():
                if other != name:
                    file.writestr(other, content)
            with file.open(zipfile.ZipInfo(name), "w", force_zip64=True) as member:
                member.write(b"x")
        stated = bytearray(path.read_bytes())  # a bomb need not be large to state a size
        with zipfile.ZipFile(path) as file:
            info = file.getinfo(name)
        info.file_size = limit + 1
        _restate(path, stated, name, limit + 1)
        await refused(client, match="too large|cannot be used")


async def test_content_that_unpacks_to_nothing_is_refused(client: Client) -> None:
    path = path_of(client)
    contents = members(path)
    empty_blocks = b"\0\0\0\xff\xff" * 2**20
    pack = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    packed = empty_blocks + pack.compress(contents["events.jsonl"]) + pack.flush()
    with zipfile.ZipFile(path, "w") as file:  # the log is last, stored as if it were not compressed
        for name, content in contents.items():
            if name != "events.jsonl":
                file.writestr(name, content)
        file.writestr("events.jsonl", packed)
    forged = bytearray(path.read_bytes())
    for header, method, crc, size in ((b"PK\x01\x02", 10, 16, 24), (b"PK\x03\x04", 8, 14, 22)):
        at = forged.rindex(header, 0, forged.rindex(b"events.jsonl", 0, None if size == 24 else len(forged) - 200_000))
        forged[at + method : at + method + 2] = zipfile.ZIP_DEFLATED.to_bytes(2, "little")
        forged[at + crc : at + crc + 4] = zlib.crc32(contents["events.jsonl"]).to_bytes(4, "little")
        forged[at + size : at + size + 4] = len(contents["events.jsonl"]).to_bytes(4, "little")
    path.write_bytes(forged)
    assert members(path) == contents, "the file is valid, but slow"
    await refused(client, match="larger compressed")


@pytest.mark.parametrize("is_zip64", [False, True])
def test_directory_with_impossibly_many_members_is_not_read(is_zip64: bool) -> None:
    name, count = b"blobs/" + b"0" * 64, MAX_DIRECTORY_BYTES // 100
    entry = struct.pack("<4s4B4HL2L5H2L", b"PK\x01\x02", 20, 3, 20, *[0] * 8, len(name), *[0] * 6) + name
    directory = entry * count
    size, end = len(directory), b""
    if is_zip64:
        end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, 0)
        end += struct.pack("<4sLQL", b"PK\x06\x07", 0, size, 1)
        size = 0xFFFFFFFF
    file = CountedReads(directory + end + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, size, 0, 0))
    with pytest.raises(CorruptArchive, match="directory"):
        ArchivedFile(file, NAME, size_bytes=len(file.getvalue()))
    assert file.most <= MAX_DIRECTORY_BYTES


class CountedReads(io.BytesIO):
    """A file that notes how much is read of it at once."""

    most = 0

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self.most = max(self.most, len(content))
        return content


def _restate(path: Path, content: bytearray, name: str, size: int) -> None:
    """Let the central directory state another size of a member."""
    at = content.rindex(b"PK\x01\x02", 0, content.rindex(name.encode()))
    content[at + 24 : at + 28] = size.to_bytes(4, "little")
    path.write_bytes(content)


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
async def test_other_ways_to_compress_are_refused(client: Client, kind: int) -> None:
    contents = members(path_of(client))
    with zipfile.ZipFile(path_of(client), "w", kind) as file:
        for name, content in contents.items():
            file.writestr(name, content)
    await refused(client, match="in another way")


@pytest.mark.parametrize("change", [{"version": 3}, {"conversation_id": "another"}, {"schema_version": 10_000}])
async def test_a_manifest_of_another_kind_is_refused(client: Client, change: dict[str, Any]) -> None:
    contents = members(path_of(client))
    manifest = json.loads(contents["manifest.json"]) | change
    rewrite(path_of(client), contents | {"manifest.json": json.dumps(manifest).encode()}, is_honest=False)
    await refused(client, match="cannot be used")


def _damaged(whole: bytes, draw: random.Random) -> bytes:
    content = bytearray(whole)
    for _ in range(draw.randrange(1, 20)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content[: draw.randrange(len(content))] if draw.random() < 0.2 else content)


@pytest.mark.parametrize("count", [150, pytest.param(5_000, marks=pytest.mark.soak)])
async def test_bytes_of_every_kind_raise_expected_errors_or_read_equal(client: Client, count: int, soak_seed) -> None:
    path, draw = path_of(client), random.Random(soak_seed)
    whole, before = path.read_bytes(), await client.events(NAME, is_whole=True)
    archive = client.archive
    assert isinstance(archive, Archive)
    for number in range(count):
        path.write_bytes(_damaged(whole, draw))
        try:
            events = await archive.read_checked(NAME)
        except CorruptArchive:
            continue
        assert events == before, f"seed {soak_seed}, file {number}"


def test_ids_reach_no_other_path(tmp_path: Path) -> None:
    place = ArchiveStorage(str(tmp_path / "archive"))
    for name in ("../../x", "a/b", "..", "a\0b", "", "x" * 300):
        with pytest.raises(UsageError):
            place.path(name)
        with pytest.raises(UsageError):
            place.write(name, io.BytesIO(b"x"))
    assert [*tmp_path.iterdir()] == []
