"""Files on their way between people and workspaces, kept in the store in pieces.

Holds: a file is there whole or not at all, and the content of a kept one is checked against its name. No piece is so
large that other conversations wait for it. A file on its way expires after its time to live.
Keys: `deck:{k}:c:<id>:parcel:<name>`, a hash of pieces; the name is the content's SHA-256, or a token's.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from broker.contract.workspace_sources import GitSource, UploadedSource
from broker.runtime.errors import CorruptEntry, UsageError
from broker.store.connection import Argument
from broker.store.store import Store

PIECE_BYTES = 256 * 2**10
MAX_STORED_FILE_BYTES = 64 * 2**20


def check_size(size_bytes: int, what: str, limit_bytes: int = MAX_STORED_FILE_BYTES) -> None:
    """Refuse what is too large for the store.

    Raises:
        UsageError: it has more than 64 MiB.
    """
    if size_bytes > limit_bytes:
        raise UsageError(
            f"{what} has {size_bytes:,} bytes; the limit is {limit_bytes:,}.",
            remedy="Take less at once, or use a directory or a repository that the tool worker can reach.",
        )


def content_name(content: bytes) -> str:
    """Return the name that a file is kept under."""
    return hashlib.sha256(content).hexdigest()


class StoredFiles:
    """The files that a store holds for conversations."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def keep(self, conversation_id: str, content: bytes) -> str:
        """Keep a file for as long as the log, which need not be there yet, and return its name. Idempotent."""
        name = content_name(content)
        await self.put(conversation_id, name, content)
        return name

    async def put(
        self,
        conversation_id: str,
        name: str,
        content: bytes,
        *,
        ttl_seconds: float | None = None,
        limit_bytes: int = MAX_STORED_FILE_BYTES,
    ) -> None:
        """Write a file under a name. Idempotent.

        Raises:
            UsageError: it is too large.
        """
        check_size(len(content), "The file", limit_bytes)
        key = self._store.keys(conversation_id).stored_file(name)
        expiry = [] if ttl_seconds is None else [("PEXPIRE", key, int(ttl_seconds * 1000))]
        for at in range(0, len(content), PIECE_BYTES):
            # Each at its place, so that one whose reply was lost is not there twice.
            piece = ("HSET", key, at // PIECE_BYTES, content[at : at + PIECE_BYTES])
            await self._store.call_many([piece, *expiry])
        # Last, so that nobody takes a part for the whole. One that was laid by has an end, and loses it.
        last: list[tuple[Argument, ...]] = [*expiry] or [("PERSIST", key)]
        await self._store.call_many([("HSET", key, "size", len(content)), *last])

    async def lay_by(self, conversation_id: str, name: str, source: Path, *, ttl_seconds: float) -> None:
        """Keep a file for a conversation that may begin with it, piece by piece, until it expires. Idempotent.

        One that is there already stays as it is: it may have been claimed.

        Args:
            name: the name of its content.

        Raises:
            UsageError: it is too large.
            OSError: it cannot be read.
        """
        size_bytes = (await asyncio.to_thread(source.stat)).st_size
        check_size(size_bytes, "The file")
        keys, ttl_ms = (self._store.keys(conversation_id).stored_file(name),), int(ttl_seconds * 1000)
        with source.open("rb") as file:
            for n in range(-(-size_bytes // PIECE_BYTES)):
                piece = await asyncio.to_thread(file.read, PIECE_BYTES)
                if await self._store.function("deck_lay_by", keys, ttl_ms, n, piece) == ["there"]:
                    return
        await self._store.function("deck_lay_by", keys, ttl_ms, "size", size_bytes)

    async def refresh(self, conversation_id: str, name: str, *, ttl_seconds: float) -> bool:
        """Keep a file that was laid by for longer; one that has been claimed stays. False: it is not there."""
        key = self._store.keys(conversation_id).stored_file(name)
        commands = [("PEXPIRE", key, int(ttl_seconds * 1000), "XX"), ("HEXISTS", key, "size")]
        _, is_whole = await self._store.call_many(commands)
        return bool(is_whole)

    async def claim(self, conversation_id: str, name: str) -> bool:
        """Let a file that was laid by stay for as long as the log; False: it is not there. Idempotent."""
        key = self._store.keys(conversation_id).stored_file(name)
        return bool(await self._store.function("deck_claim_file", (key,)) == ["claimed"])

    async def fetch(self, conversation_id: str, name: str) -> bytes:
        """Return what is under a name.

        Raises:
            CorruptEntry: it is not there, or not what it was.
        """
        key = self._store.keys(conversation_id).stored_file(name)
        size = await self._store.call("HGET", key, "size")
        if size is None:
            raise CorruptEntry("The file is not in the store.", remedy="Upload it again.")
        count = -(-int(size) // PIECE_BYTES)
        pieces = [await self._store.call("HGET", key, n) for n in range(count)]
        content = b"".join(piece or b"" for piece in pieces)
        if len(content) != int(size):
            raise CorruptEntry("The file in the store is not whole.", remedy="Upload it again.")
        if len(name) == hashlib.sha256().digest_size * 2 and content_name(content) != name:
            raise CorruptEntry("The file in the store is damaged.", remedy="Upload it again.")
        return content

    async def lend(self, source_id: str, target_id: str, source: GitSource | UploadedSource | None) -> None:
        """Give another conversation the file that this one began with. Idempotent.

        Raises:
            CorruptEntry: see `fetch`.
        """
        if not isinstance(source, UploadedSource):
            return
        # A delegate is lent it again by each owner of its parent; the size is written last.
        if not await self.claim(target_id, source.parcel):
            await self.keep(target_id, await self.fetch(source_id, source.parcel))

    async def drop(self, conversation_id: str, name: str) -> None:
        """Remove a file. Idempotent."""
        key = self._store.keys(conversation_id).stored_file(name)
        await self._store.call("DEL", key)
