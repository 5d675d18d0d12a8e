"""Encrypted conversations leave the store for the archive: unreadable without their key, listed without it."""

from __future__ import annotations

import base64
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.contract.specs import Tenancy
from broker.runtime.errors import CorruptEntry, DataLocked
from broker.store.encryption import Cipher, MasterKeys
from broker.store.store import open_store
from deckhands.client.archive.archive import Archive, describe_all
from deckhands.client.archive.archived_file import PLAIN_BYTES, decrypt_pieces, encrypt_pieces
from deckhands.client.client import Client
from tests.archive_parts import LONG_TEXT, begin_ended, retired
from tests.stores import RealServer, emptied

KEYS = f"one:{base64.b64encode(bytes(range(32))).decode()}"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
async def client(valkey_server: RealServer, place: Path) -> AsyncIterator[Client]:
    store = await open_store(await emptied(valkey_server.url), masters=MasterKeys(KEYS))
    async with Client(store, str(place)) as client:
        yield client


async def test_an_archived_file_is_read_with_the_key_alone(client: Client, place: Path, tmp_path: Path) -> None:
    await begin_ended(client, "of-acme", tenancy=Tenancy(tenant="acme"), labels={"team": "ci"})
    before, summary = await client.events("of-acme", is_whole=True), await client.summary("of-acme")
    assert (await retired(client.store, place, tmp_path))["archived"] == 1
    (path,) = place.rglob("*.zip")
    content = path.read_bytes()
    texts = [LONG_TEXT[:40].encode(), before[1].content.encode(), b'"kind"']
    assert not any(text in content for text in texts)
    with zipfile.ZipFile(path) as file:
        assert not any(text in file.read(name) for name in file.namelist() for text in texts)
    assert await client.events("of-acme", is_whole=True) == before
    assert await client.summary("of-acme") == summary
    without = Archive(str(place))
    (page,) = [page async for page in describe_all(without, ["of-acme"], lambda _: None)]
    (listed,) = page
    assert (listed.manifest.tenant, listed.labels, listed.title) == ("acme", {"team": "ci"}, "")
    assert listed.iterations == summary.iterations
    with pytest.raises(DataLocked, match="encrypted"):
        await without.events("of-acme")


async def test_a_restored_conversation_is_encrypted_again(client: Client, place: Path, tmp_path: Path) -> None:
    await begin_ended(client, "of-acme", tenancy=Tenancy(tenant="acme"))
    before = await client.events("of-acme", is_whole=True)
    await retired(client.store, place, tmp_path)
    await client.restore("of-acme")
    entries = await client.store.connection.call("XRANGE", client.store.known_keys("of-acme").events, "-", "+")
    assert {entry[1][-1][:1] for entry in entries} == {b"\xff"}
    assert await client.events("of-acme", is_whole=True) == before
    assert (await retired(client.store, place, tmp_path))["archived"] == 1


async def test_a_deleted_key_makes_the_archive_unreadable(
    client: Client, place: Path, tmp_path: Path, valkey_server: RealServer
) -> None:
    await begin_ended(client, "of-acme", tenancy=Tenancy(tenant="acme"))
    await begin_ended(client, "of-shop", tenancy=Tenancy(tenant="shop"))
    await begin_ended(client, "still-here", tenancy=Tenancy(tenant="acme"), labels={"keep": "yes"})
    rules = '[[rule]]\nlabels = {keep = "yes"}\nage = "never"\n[[rule]]\nage = "0s"'
    assert (await retired(client.store, place, tmp_path, rules))["archived"] == 2
    assert await client.store.encryption.delete_key("acme")
    other = await open_store(valkey_server.url, masters=MasterKeys(KEYS))
    async with Client(other, str(place)) as reader:
        with pytest.raises(DataLocked, match="was deleted"):
            await reader.events("of-acme")
        assert len(await reader.events("of-shop")) > 1
        # What can no longer be read stays where it is, and hinders no other.
        assert await retired(other, place, tmp_path) == {"archived": 0, "deleted": 0, "kept": 0, "failed": 1}


def test_frames_are_whole_and_in_order() -> None:
    cipher = Cipher("abcdefgh", b"k" * 32, "conversation")
    for content in (b"", b"a", b"ab" * PLAIN_BYTES, b"x" * PLAIN_BYTES):
        sealed = b"".join(encrypt_pieces(cipher, "events.jsonl", [content[:7], content[7:]]))
        pieces = [sealed[at : at + 1_000] for at in range(0, len(sealed), 1_000)]
        assert b"".join(decrypt_pieces(cipher, "events.jsonl", pieces)) == content
        for wrong in (sealed[:-1], sealed + b"x", b"", b"\xff" * 40):
            with pytest.raises(CorruptEntry):
                list(decrypt_pieces(cipher, "events.jsonl", [wrong]))
        with pytest.raises(CorruptEntry):
            list(decrypt_pieces(cipher, "summary.json", [sealed]))
    long = list(encrypt_pieces(cipher, "events.jsonl", [b"ab" * PLAIN_BYTES]))
    assert len(long) == 2
    for moved in (long[:1], long[1:], long[::-1]):
        with pytest.raises(CorruptEntry):
            list(decrypt_pieces(cipher, "events.jsonl", moved))
