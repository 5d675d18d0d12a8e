"""Uploads for conversations that are not created yet: limits their number, and decides which conversation may use one.

Holds: an upload belongs to the conversation id that its idempotency key and tenant determine. A tenant has at most 16
waiting; claimed and expired ones do not count.
Does not: store the files; `stored_files` does.
Keys: `deck:{0}:keys:uploads:<sha256>`, by tenant.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from broker.contract import GitSource, UploadedSource
from broker.coordination import StoredFiles
from broker.runtime import DeckhandsError, UsageError
from broker.store import Store

KEPT_SECONDS = 3_600
MAX_WAITING = 16


class TooManyUploads(DeckhandsError):
    """The tenant has the maximum number of waiting uploads."""

    code = "too_many_uploads"
    retryable = True

    def __init__(self) -> None:
        super().__init__(
            f"{MAX_WAITING} uploaded files wait for their conversations.",
            remedy="Create those conversations, or wait: a file is kept for an hour.",
        )


class UnknownUpload(UsageError):
    """The upload that a conversation should start with does not exist."""

    code = "unknown_upload"

    def __init__(self) -> None:
        super().__init__(
            "workspace: this file was not uploaded under the Idempotency-Key of the request, or more than an hour ago.",
            remedy="Upload it by `PUT /uploads/SHA256` under the same key.",
        )


class Uploads:
    """The waiting uploads of a store's tenants."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._files = StoredFiles(store)
        self._root = store.all_shards[0].api_keys

    async def add(self, tenant: str, conversation_id: str, name: str, source: Path) -> None:
        """Keep an upload until its conversation is created, for an hour at most. Idempotent.

        Args:
            name: the SHA-256 of its content.

        Raises:
            TooManyUploads: the tenant has the maximum number waiting.
            UsageError: the file is too large.
        """
        key = self._name(tenant)
        member = f"{conversation_id}:{name}"
        now = self._store.clock.now().timestamp()
        if await self._files.refresh(conversation_id, name, ttl_seconds=KEPT_SECONDS):
            again: list[tuple[str | float, ...]] = [
                ("ZADD", key, "XX", now + KEPT_SECONDS, member),  # unless it is claimed
                ("EXPIRE", key, KEPT_SECONDS),
            ]
            await self._store.call_many(again)
            return
        counting: list[tuple[str | float, ...]] = [
            ("ZREMRANGEBYSCORE", key, "-inf", now),
            ("ZADD", key, now + KEPT_SECONDS, member),
            ("EXPIRE", key, KEPT_SECONDS),
            ("ZCARD", key),
        ]
        _, is_new, _, waiting = await self._store.call_many(counting)
        if waiting > MAX_WAITING:
            if is_new:
                await self._uncount(tenant, member)
            raise TooManyUploads
        await self._files.put_chunks(conversation_id, name, source, ttl_seconds=KEPT_SECONDS)

    async def require(self, conversation_id: str, source: GitSource | UploadedSource | None) -> None:
        """Check that the uploaded source of a new conversation exists, and renew its expiry. Ignores other sources.

        Raises:
            UnknownUpload: the upload does not exist.
        """
        if isinstance(source, UploadedSource) and not await self._files.refresh(
            conversation_id, source.parcel, ttl_seconds=KEPT_SECONDS
        ):
            raise UnknownUpload

    async def claim(self, tenant: str, conversation_id: str, source: GitSource | UploadedSource | None) -> None:
        """Keep the uploaded source of a created conversation; do nothing for other sources. Idempotent."""
        if not isinstance(source, UploadedSource):
            return
        await self._files.claim(conversation_id, source.parcel)
        await self._uncount(tenant, f"{conversation_id}:{source.parcel}")

    async def _uncount(self, tenant: str, member: str) -> None:
        key = self._name(tenant)
        await self._store.call("ZREM", key, member)

    def _name(self, tenant: str) -> str:
        return f"{self._root}:uploads:{sha256(tenant.encode()).hexdigest()}"
