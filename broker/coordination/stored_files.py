"""Files in transit between users and workspaces, stored in pieces.

Holds: a file exists whole or not at all. The content of a kept file is checked against its name. Pieces are small
enough not to delay other conversations. A file in transit expires after its time to live. The initial files of a
conversation are encrypted with the key of the secrets, which workers and clients have and the store has not. A transfer
encrypts its files itself.
Keys: `deck:{k}:c:<id>:parcel:<name>`, a hash of pieces. The name is the content's SHA-256, or a token's. The field
`size` is the size of the content; `sealed` names the key. A file without `sealed` was stored unencrypted by an older
version.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

from broker.contract import GitSource, UploadedSource
from broker.runtime import BrokerSettings, CorruptEntry, UsageError
from broker.secrets import ONE_KEY, SecretsLocked, decrypt, encrypt, key_fingerprint, load_secret_key
from broker.store import Argument, Store

PIECE_BYTES = 256 * 2**10
MAX_STORED_FILE_BYTES = 64 * 2**20


def check_size(size_bytes: int, what: str, limit_bytes: int = MAX_STORED_FILE_BYTES) -> None:
    """Check that content is not too large for the store.

    Raises:
        UsageError: it has more than 64 MiB.
    """
    if size_bytes > limit_bytes:
        raise UsageError(
            f"{what} has {size_bytes:,} bytes; the limit is {limit_bytes:,}.",
            remedy="Take less at once, or use a directory or a repository that the tool worker can reach.",
        )


def make_content_name(content: bytes) -> str:
    """Return the name of a file with this content."""
    return hashlib.sha256(content).hexdigest()


class StoredFiles:
    """The files that a store holds for conversations.

    Args:
        key: returns the key that encrypts files; called when it is first needed. None for the key that the environment
            names, or else one that is created in our home when the first file is encrypted.
    """

    def __init__(self, store: Store, key: Callable[[], bytes | None] | None = None) -> None:
        self._store = store
        self._find_key = key
        self._key: bytes | None = None

    async def keep(self, conversation_id: str, content: bytes) -> str:
        """Encrypt a file and store it for as long as the log, which need not exist yet. Idempotent.

        Returns:
            Its name.

        Raises:
            UsageError: it is too large.
            SecretsLocked: this process has no key.
        """
        check_size(len(content), "The file")
        name = make_content_name(content)
        key = (await self._store.locate(conversation_id)).stored_file(name)
        size, sealed = await self._store.call("HMGET", key, "size", "sealed")
        if size is not None and sealed is None:  # an older version has stored it, and may be reading it
            await self._store.call("PERSIST", key)
            return name
        key_bytes = self._load_key(is_made=True)
        for n in range(-(-len(content) // PIECE_BYTES)):
            piece = encrypt(key_bytes, content[n * PIECE_BYTES : (n + 1) * PIECE_BYTES], _describe_piece(name, n))
            # Each piece has its own field, so that a repeated write adds no second copy.
            await self._store.call("HSET", key, n, piece)
        # Last, so that no reader takes a part for the whole. `PERSIST` removes the expiry of an unclaimed file.
        last = ("HSET", key, "size", len(content), "sealed", key_fingerprint(key_bytes))
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
        """Store a file under a name, unencrypted. Idempotent.

        Raises:
            UsageError: it is too large.
        """
        check_size(len(content), "The file", limit_bytes)
        key = (await self._store.locate(conversation_id)).stored_file(name)
        expiry = [] if ttl_seconds is None else [("PEXPIRE", key, int(ttl_seconds * 1000))]
        for at in range(0, len(content), PIECE_BYTES):
            piece = ("HSET", key, at // PIECE_BYTES, content[at : at + PIECE_BYTES])
            await self._store.call_many([piece, *expiry])
        last: list[tuple[Argument, ...]] = [*expiry] or [("PERSIST", key)]
        await self._store.call_many([("HSET", key, "size", len(content)), *last])

    async def put_chunks(self, conversation_id: str, name: str, source: Path, *, ttl_seconds: float) -> None:
        """Encrypt a file in pieces for a conversation that may start with it. It expires unless claimed. Idempotent.

        An existing file stays unchanged, because it may have been claimed.

        Args:
            name: the name of its content.

        Raises:
            UsageError: it is too large.
            OSError: it cannot be read.
            SecretsLocked: this process has no key.
        """
        size_bytes = (await asyncio.to_thread(source.stat)).st_size
        check_size(size_bytes, "The file")
        keys = ((await self._store.locate(conversation_id)).stored_file(name),)
        ttl_ms = int(ttl_seconds * 1000)
        key = self._load_key(is_made=True)
        with source.open("rb") as file:
            for n in range(-(-size_bytes // PIECE_BYTES)):
                piece = encrypt(key, await asyncio.to_thread(file.read, PIECE_BYTES), _describe_piece(name, n))
                if await self._store.call_function("deck_lay_by", keys, ttl_ms, n, piece) == ["there"]:
                    return
        await self._store.call_function("deck_lay_by", keys, ttl_ms, "sealed", key_fingerprint(key))
        await self._store.call_function("deck_lay_by", keys, ttl_ms, "size", size_bytes)

    async def refresh(self, conversation_id: str, name: str, *, ttl_seconds: float) -> bool:
        """Extend the time to live of an unclaimed file; a claimed one has none. Returns False if it does not exist."""
        key = (await self._store.locate(conversation_id)).stored_file(name)
        commands = [("PEXPIRE", key, int(ttl_seconds * 1000), "XX"), ("HEXISTS", key, "size")]
        _, is_whole = await self._store.call_many(commands)
        return bool(is_whole)

    async def claim(self, conversation_id: str, name: str) -> bool:
        """Keep an unclaimed file for as long as the log. Returns False if it does not exist. Idempotent."""
        key = (await self._store.locate(conversation_id)).stored_file(name)
        return bool(await self._store.call_function("deck_claim_file", (key,)) == ["claimed"])

    async def fetch(self, conversation_id: str, name: str) -> bytes:
        """Return the content of a stored file.

        Raises:
            CorruptEntry: it does not exist, or its content has changed.
            SecretsLocked: it is encrypted, and no key of this process decrypts it.
        """
        size, sealed, pieces = await self._load_pieces(conversation_id, name)
        if sealed is not None:
            pieces = await asyncio.to_thread(self._decrypt_piece, name, sealed, pieces)
        content = b"".join(pieces)
        if len(content) != size:
            raise CorruptEntry("The file in the store is not whole.", remedy="Upload it again.")
        if len(name) == hashlib.sha256().digest_size * 2 and make_content_name(content) != name:
            raise CorruptEntry("The file in the store is damaged.", remedy="Upload it again.")
        return content

    async def copy_to(self, source_id: str, target_id: str, source: GitSource | UploadedSource | None) -> None:
        """Copy an initial file of this conversation to another one, as it is in the store. Idempotent.

        Raises:
            CorruptEntry: it does not exist, or a part is missing.
        """
        # Each owner of a parent copies it to the delegate again. The size is written last.
        if not isinstance(source, UploadedSource) or await self.claim(target_id, source.parcel):
            return
        size, sealed, pieces = await self._load_pieces(source_id, source.parcel)
        if not all(pieces):
            raise CorruptEntry("The file in the store is not whole.", remedy="Upload it again.")
        key = (await self._store.locate(target_id)).stored_file(source.parcel)
        for n, piece in enumerate(pieces):
            await self._store.call("HSET", key, n, piece)
        of_seal: tuple[Argument, ...] = () if sealed is None else ("sealed", sealed)
        await self._store.call_many([("HSET", key, "size", size, *of_seal), ("PERSIST", key)])

    async def remove(self, conversation_id: str, name: str) -> None:
        """Remove a file. Idempotent."""
        key = (await self._store.locate(conversation_id)).stored_file(name)
        await self._store.call("DEL", key)

    async def _load_pieces(self, conversation_id: str, name: str) -> tuple[int, bytes | None, list[bytes]]:
        """Return the size of a file, the name of its encryption key, and its pieces as stored.

        Raises:
            CorruptEntry: it does not exist.
        """
        key = (await self._store.locate(conversation_id)).stored_file(name)
        size, sealed = await self._store.call("HMGET", key, "size", "sealed")
        if size is None:
            raise CorruptEntry("The file is not in the store.", remedy="Upload it again.")
        count = -(-int(size) // PIECE_BYTES)
        return int(size), sealed, [await self._store.call("HGET", key, n) or b"" for n in range(count)]

    def _decrypt_piece(self, name: str, sealed: bytes, pieces: list[bytes]) -> list[bytes]:
        key = self._load_key()
        if key_fingerprint(key).encode() != sealed:
            raise SecretsLocked("The file was sealed with another key.", remedy=ONE_KEY)
        try:
            return [decrypt(key, piece, _describe_piece(name, n)) for n, piece in enumerate(pieces)]
        except ValueError as error:
            raise CorruptEntry("The file in the store is damaged.", remedy="Upload it again.") from error

    def _load_key(self, *, is_made: bool = False) -> bytes:
        if self._key is None and self._find_key is None:
            self._key = load_secret_key(BrokerSettings.from_env(), is_made=is_made)
        elif self._key is None and self._find_key is not None:
            self._key = self._find_key()
        if self._key is None:
            raise SecretsLocked("There is no key here that seals and opens files.", remedy=ONE_KEY)
        return self._key


def _describe_piece(name: str, piece: int) -> str:
    """Return the description that is authenticated with an encrypted piece, so that pieces cannot be exchanged."""
    return f"file {name} {piece}"
