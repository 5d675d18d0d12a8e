"""Large texts and other bytes stored beside the log, addressed by the SHA-256 of their content.

Holds: a blob is written before the event that refers to it. Each blob is checked against its address when read.
Keys: `deck:{k}:c:<id>:blob:<sha256>`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from broker.contract import BlobRef, Event, EventT, codec
from broker.store import Cipher, Store

CHUNK_BYTES = 4 << 20
"""Approximate size of one request: its reply must arrive in time."""


def split_into_chunks(contents: Mapping[str, bytes]) -> list[dict[str, bytes]]:
    """Split texts into groups, one for each request."""
    chunks: list[dict[str, bytes]] = []
    size = CHUNK_BYTES
    for sha256, content in contents.items():
        if size + len(content) > CHUNK_BYTES:
            chunks.append({})
            size = 0
        chunks[-1][sha256] = content
        size += len(content)
    return chunks


class Blobs:
    """The blobs of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, conversation_id: str, contents: Mapping[str, bytes], cipher: Cipher | None = None) -> None:
        """Store texts under their addresses, encrypted with a cipher. Idempotent."""
        names = await self._store.locate(conversation_id)
        commands = [
            ("SET", names.blob(sha256), content if cipher is None else cipher.encrypt(content, _describe(sha256)))
            for sha256, content in contents.items()
        ]
        await self._store.call_many(commands)

    async def add(self, conversation_id: str, content: bytes) -> BlobRef:
        """Store bytes for an event that is appended next, and return their reference. Idempotent."""
        sha256 = hashlib.sha256(content).hexdigest()
        cipher = await self._store.encryption.find_cipher(conversation_id)
        await self.put(conversation_id, {sha256: content}, cipher)
        return BlobRef(sha256=sha256, size_bytes=len(content))

    async def fetch_binary(self, conversation_id: str, events: Iterable[Event]) -> dict[str, bytes]:
        """Return the binary blobs of events, by address; raises CorruptEntry if one is missing or damaged."""
        addresses = list_binary(events)
        return check_blobs(await self.fetch(conversation_id, addresses), addresses) if addresses else {}

    async def fetch(self, conversation_id: str, addresses: list[str]) -> dict[str, bytes]:
        """Return the blobs that exist, by address.

        Raises:
            CorruptEntry: one of an encrypted conversation was changed.
            DataLocked: its key was deleted, or is under another master key.
        """
        cipher = await self._store.encryption.find_cipher(conversation_id)
        names = await self._store.locate(conversation_id)
        found = await self._store.call_many([("GET", names.blob(sha256)) for sha256 in addresses])
        return {
            sha256: content if cipher is None else cipher.decrypt(content, _describe(sha256))
            for sha256, content in zip(addresses, found, strict=True)
            if content is not None
        }

    async def restore_event(self, conversation_id: str, event: EventT) -> EventT:
        """Return the event with the full text of its shortened fields.

        Raises:
            CorruptEntry: a blob is missing or damaged.
        """
        texts = [ref.sha256 for path, ref in (event.blobs or {}).items() if not codec.is_binary(path)]
        if not texts:
            return event
        contents = await self.fetch(conversation_id, texts)
        wire = codec.restore(event.wire(), contents)
        whole = codec.event_from_wire(wire, event.id)
        assert isinstance(whole, type(event))
        return whole


def list_binary(events: Iterable[Event]) -> list[str]:
    """Return the addresses of the blobs that are bytes."""
    return [ref.sha256 for event in events for path, ref in (event.blobs or {}).items() if codec.is_binary(path)]


def check_blobs(contents: Mapping[str, bytes], addresses: Iterable[str]) -> dict[str, bytes]:
    """Return the blobs with these addresses.

    Raises:
        CorruptEntry: one is missing or damaged.
    """
    return {sha256: codec.find_blob(contents, sha256, sha256) for sha256 in addresses}


def _describe(sha256: str) -> str:
    return f"blob {sha256}"
