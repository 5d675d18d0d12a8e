"""Files on their way between people and workspaces, kept in the store in pieces.

Holds: a file is there whole or not at all, and the content of a kept one is checked against its name. No piece is so
large that other conversations wait for it. A file on its way expires after its time to live. What a conversation begins
with is sealed with the key of the secrets, which workers and clients have and the store has not; a transfer seals what
it puts here by itself.
Keys: `deck:{k}:c:<id>:parcel:<name>`, a hash of pieces; the name is the content's SHA-256, or a token's. The field
`size` is that of the content, and `sealed` names the key; an older version has not sealed what has no such field.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

from broker.contract import GitSource, UploadedSource
from broker.runtime import BrokerSettings, CorruptEntry, UsageError
from broker.secrets import ONE_KEY, SecretsLocked, decrypt, encrypt, key_name, secret_key
from broker.store import Argument, Store

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
    """The files that a store holds for conversations.

    Args:
        key: returns what seals files, and opens them; asked when it is first needed. None: the one that the
            environment names; where it names none, one is made in our home when the first file is sealed.
    """

    def __init__(self, store: Store, key: Callable[[], bytes | None] | None = None) -> None:
        self._store = store
        self._find_key = key
        self._key: bytes | None = None

    async def keep(self, conversation_id: str, content: bytes) -> str:
        """Seal a file and keep it for as long as the log, which need not be there yet. Idempotent.

        Returns:
            Its name.

        Raises:
            UsageError: it is too large.
            SecretsLocked: there is no key here.
        """
        check_size(len(content), "The file")
        name = content_name(content)
        key = self._store.keys(conversation_id).stored_file(name)
        size, sealed = await self._store.call("HMGET", key, "size", "sealed")
        if size is not None and sealed is None:  # an older version has kept it, and may be reading it
            await self._store.call("PERSIST", key)
            return name
        key_bytes = self._required_key(is_made=True)
        for n in range(-(-len(content) // PIECE_BYTES)):
            piece = encrypt(key_bytes, content[n * PIECE_BYTES : (n + 1) * PIECE_BYTES], _about(name, n))
            # Each at its place, so that one whose reply was lost is not there twice.
            await self._store.call("HSET", key, n, piece)
        # Last, so that nobody takes a part for the whole. One that was laid by has an end, and loses it.
        last = ("HSET", key, "size", len(content), "sealed", key_name(key_bytes))
        await self._store.call_many([last, ("PERSIST", key)])
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
        """Write a file under a name, as it is. Idempotent.

        Raises:
            UsageError: it is too large.
        """
        check_size(len(content), "The file", limit_bytes)
        key = self._store.keys(conversation_id).stored_file(name)
        expiry = [] if ttl_seconds is None else [("PEXPIRE", key, int(ttl_seconds * 1000))]
        for at in range(0, len(content), PIECE_BYTES):
            piece = ("HSET", key, at // PIECE_BYTES, content[at : at + PIECE_BYTES])
            await self._store.call_many([piece, *expiry])
        last: list[tuple[Argument, ...]] = [*expiry] or [("PERSIST", key)]
        await self._store.call_many([("HSET", key, "size", len(content)), *last])

    async def lay_by(self, conversation_id: str, name: str, source: Path, *, ttl_seconds: float) -> None:
        """Seal a file for a conversation that may begin with it, piece by piece, until it expires. Idempotent.

        One that is there already stays as it is: it may have been claimed.

        Args:
            name: the name of its content.

        Raises:
            UsageError: it is too large.
            OSError: it cannot be read.
            SecretsLocked: there is no key here.
        """
        size_bytes = (await asyncio.to_thread(source.stat)).st_size
        check_size(size_bytes, "The file")
        keys, ttl_ms = (self._store.keys(conversation_id).stored_file(name),), int(ttl_seconds * 1000)
        key = self._required_key(is_made=True)
        with source.open("rb") as file:
            for n in range(-(-size_bytes // PIECE_BYTES)):
                piece = encrypt(key, await asyncio.to_thread(file.read, PIECE_BYTES), _about(name, n))
                if await self._store.function("deck_lay_by", keys, ttl_ms, n, piece) == ["there"]:
                    return
        await self._store.function("deck_lay_by", keys, ttl_ms, "sealed", key_name(key))
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
            SecretsLocked: it is sealed, and no key here opens it.
        """
        size, sealed, pieces = await self._pieces(conversation_id, name)
        if sealed is not None:
            pieces = await asyncio.to_thread(self._opened, name, sealed, pieces)
        content = b"".join(pieces)
        if len(content) != size:
            raise CorruptEntry("The file in the store is not whole.", remedy="Upload it again.")
        if len(name) == hashlib.sha256().digest_size * 2 and content_name(content) != name:
            raise CorruptEntry("The file in the store is damaged.", remedy="Upload it again.")
        return content

    async def lend(self, source_id: str, target_id: str, source: GitSource | UploadedSource | None) -> None:
        """Give another conversation the file that this one began with, as it is in the store. Idempotent.

        Raises:
            CorruptEntry: it is not there, or a part is missing.
        """
        # A delegate is lent it again by each owner of its parent; the size is written last.
        if not isinstance(source, UploadedSource) or await self.claim(target_id, source.parcel):
            return
        size, sealed, pieces = await self._pieces(source_id, source.parcel)
        if not all(pieces):
            raise CorruptEntry("The file in the store is not whole.", remedy="Upload it again.")
        key = self._store.keys(target_id).stored_file(source.parcel)
        for n, piece in enumerate(pieces):
            await self._store.call("HSET", key, n, piece)
        of_seal: tuple[Argument, ...] = () if sealed is None else ("sealed", sealed)
        await self._store.call_many([("HSET", key, "size", size, *of_seal), ("PERSIST", key)])

    async def drop(self, conversation_id: str, name: str) -> None:
        """Remove a file. Idempotent."""
        key = self._store.keys(conversation_id).stored_file(name)
        await self._store.call("DEL", key)

    async def _pieces(self, conversation_id: str, name: str) -> tuple[int, bytes | None, list[bytes]]:
        """Return the size of a file, the name of the key that seals it, and its pieces as they are.

        Raises:
            CorruptEntry: it is not there.
        """
        key = self._store.keys(conversation_id).stored_file(name)
        size, sealed = await self._store.call("HMGET", key, "size", "sealed")
        if size is None:
            raise CorruptEntry("The file is not in the store.", remedy="Upload it again.")
        count = -(-int(size) // PIECE_BYTES)
        return int(size), sealed, [await self._store.call("HGET", key, n) or b"" for n in range(count)]

    def _opened(self, name: str, sealed: bytes, pieces: list[bytes]) -> list[bytes]:
        key = self._required_key()
        if key_name(key).encode() != sealed:
            raise SecretsLocked("The file was sealed with another key.", remedy=ONE_KEY)
        try:
            return [decrypt(key, piece, _about(name, n)) for n, piece in enumerate(pieces)]
        except ValueError as error:
            raise CorruptEntry("The file in the store is damaged.", remedy="Upload it again.") from error

    def _required_key(self, *, is_made: bool = False) -> bytes:
        if self._key is None and self._find_key is None:
            self._key = secret_key(BrokerSettings.from_env(), is_made=is_made)
        elif self._key is None and self._find_key is not None:
            self._key = self._find_key()
        if self._key is None:
            raise SecretsLocked("There is no key here that seals and opens files.", remedy=ONE_KEY)
        return self._key


def _about(name: str, piece: int) -> str:
    """Return what a sealed piece is, so that none takes the place of another."""
    return f"file {name} {piece}"
