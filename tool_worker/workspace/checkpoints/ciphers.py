"""The keys of encrypted checkpoints, for the threads that save and restore them.

Holds: the conversations of a tenant share a key, so that equal files of theirs are stored once. No other tenant's
pieces have the same names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from broker.runtime import DataLocked, StoreError
from broker.store import Cipher, Encryption
from tool_worker.errors import CheckpointsUnavailable

SCOPE = "checkpoints"
LIMIT_SECONDS = 60.0

T = TypeVar("T")


class StoreCiphers:
    """Implements `CheckpointCiphers` by a store's keys, which the loop of this process reads."""

    def __init__(self, encryption: Encryption) -> None:
        self._encryption = encryption
        self._loop = asyncio.get_running_loop()

    def of_conversation(self, conversation_id: str) -> Cipher | None:
        """See `CheckpointCiphers`."""
        return self._wait_for(self._encryption.find_tenant_cipher(conversation_id, SCOPE))

    def of_key(self, sealed: bytes) -> Cipher:
        """See `CheckpointCiphers`."""
        return self._wait_for(self._encryption.load_tenant_cipher(sealed, SCOPE))

    def _wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop).result(LIMIT_SECONDS)
        except (DataLocked, StoreError, TimeoutError) as error:
            raise CheckpointsUnavailable(f"The key of the checkpoint is not known: {error}") from error
