"""Tickets: what a page in a browser opens a stream with, because it cannot send a header with its key.

Holds: a ticket opens one stream, for one key, within half a minute; the store has its hash.
Keys: `deck:{0}:keys:ticket:<sha256>`.
"""

from __future__ import annotations

import secrets
from hashlib import sha256

from broker.store.store import Store

TICKET_SECONDS = 30.0


class Tickets:
    """The tickets of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._root = store.all_shards[0].api_keys

    async def issue(self, key_id: str) -> str:
        """Return a new ticket of a key."""
        ticket = secrets.token_urlsafe(32)
        command = ("SET", self._name(ticket), key_id, "PX", int(TICKET_SECONDS * 1000))
        await self._store.persist(lambda: self._store.connection.call(*command))
        return ticket

    async def take(self, ticket: str) -> str:
        """Return whose ticket it is, and let it open nothing more; empty: it opens nothing."""
        name = self._name(ticket)
        found = await self._store.connection.call("GETDEL", name)  # once: a second call would find nothing
        return found.decode() if found is not None else ""

    def _name(self, ticket: str) -> str:
        return f"{self._root}:ticket:{sha256(ticket.encode()).hexdigest()}"
