"""Requests under idempotency keys, and their answers.

Holds: the same request has the same answer for a day; a different one under the same key is refused. If a server died
before it stored an answer, the request is performed again, because its calls are idempotent under the same key.
Keys: `deck:{0}:keys:once:<sha256>`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256

from broker.runtime import DeckhandsError, UsageError
from broker.store import Store

KEPT_SECONDS = 24 * 3600
MAX_KEY_CHARS = 255
MAX_KEPT_BYTES = 256 * 1024


class KeyReused(DeckhandsError):
    """A different request was sent under the same idempotency key."""

    code = "idempotency_key_reused"

    def __init__(self) -> None:
        super().__init__(
            "Another request was sent under this Idempotency-Key.", remedy="Use a new key for each request."
        )


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A stored answer; `body` is JSON."""

    status: int
    body: str


class IdempotentRequests:
    """The requests of a store under idempotency keys."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._root = store.all_shards[0].api_keys

    async def start(self, name: str, request: bytes) -> StoredAnswer | None:
        """Store a request, and return its answer if it has one.

        Args:
            name: the idempotency key, scoped to its tenant.
            request: the bytes that identify the request.

        Raises:
            KeyReused: a different request was sent under this key.
        """
        digest = sha256(request).hexdigest()
        key = self._name(name)
        commands = [
            ("SET", key, json.dumps({"request": digest}), "NX", "EX", KEPT_SECONDS),
            ("GET", key),
        ]
        _, found = await self._store.call_many(commands)
        kept = json.loads(found or b"{}")
        if kept.get("request", digest) != digest:
            raise KeyReused
        return StoredAnswer(kept["status"], kept["body"]) if "status" in kept else None

    async def store_answer(self, name: str, request: bytes, answer: StoredAnswer) -> None:
        """Store the answer unless it is too long; a repeat then performs the request again."""
        if len(answer.body) > MAX_KEPT_BYTES:
            return
        kept = {"request": sha256(request).hexdigest(), "status": answer.status, "body": answer.body}
        command = ("SET", self._name(name), json.dumps(kept), "EX", KEPT_SECONDS)
        await self._store.call(*command)

    async def forget(self, name: str) -> None:
        """Delete a refused request, so that its key can be used for another."""
        key = self._name(name)
        await self._store.call("DEL", key)

    def _name(self, name: str) -> str:
        return f"{self._root}:once:{sha256(name.encode()).hexdigest()}"


def parse_idempotency_key(key: str) -> str:
    """Return the value of an `Idempotency-Key` header.

    Raises:
        UsageError: the value is invalid.
    """
    if not 0 < len(key) <= MAX_KEY_CHARS or not (key.isascii() and key.isprintable()):
        raise UsageError(
            "The Idempotency-Key cannot be used.", remedy=f"Use 1 to {MAX_KEY_CHARS} printable ASCII characters."
        )
    return key
