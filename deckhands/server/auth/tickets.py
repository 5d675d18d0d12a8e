"""Tickets for pages in browsers, which cannot send a key in a header when they open a stream.

Holds: a ticket opens one stream, for one key, within half a minute; the store has its hash. A terminal needs a ticket
that was issued for terminals, which opens nothing else. An entry ticket is
exchanged for a token once, within two minutes; until then, the store contains that token.
Keys: `deck:{0}:keys:ticket:<sha256>`.
"""

from __future__ import annotations

import secrets
from hashlib import sha256

from broker.store import Store

TICKET_SECONDS = 30.0
ENTRY_SECONDS = 120.0
ENTRY = "entry:"
"""The prefix of the token in the value of an entry ticket."""
TERMINAL = "terminal:"
"""The prefix of the key id in the value of a ticket for a terminal."""


class Tickets:
    """The tickets of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._root = store.all_shards[0].api_keys

    async def issue(self, key_id: str, *, for_terminal: bool = False) -> str:
        """Return a new ticket for a key."""
        ticket = secrets.token_urlsafe(32)
        value = TERMINAL + key_id if for_terminal else key_id
        command = ("SET", self._name(ticket), value, "PX", int(TICKET_SECONDS * 1000))
        await self._store.call(*command)
        return ticket

    async def take(self, ticket: str, *, for_terminal: bool = False) -> str:
        """Return the key id of a ticket, and invalidate the ticket; empty if it is not valid for this purpose."""
        found = await self._take(ticket)
        if found.startswith(ENTRY) or found.startswith(TERMINAL) != for_terminal:
            return ""
        return found.removeprefix(TERMINAL)

    async def issue_entry(self, token: str) -> str:
        """Return a new entry ticket, which a page exchanges for a key's token once, within two minutes."""
        ticket = secrets.token_urlsafe(32)
        command = ("SET", self._name(ticket), f"{ENTRY}{token}", "PX", int(ENTRY_SECONDS * 1000))
        await self._store.call(*command)
        return ticket

    async def take_entry(self, ticket: str) -> str:
        """Return the token of an entry ticket, and invalidate the ticket; empty if it is not valid."""
        found = await self._take(ticket)
        return found.removeprefix(ENTRY) if found.startswith(ENTRY) else ""

    async def _take(self, ticket: str) -> str:
        # delete it: a second exchange must find nothing
        found = await self._store.connection.call("GETDEL", self._name(ticket))
        return found.decode() if found is not None else ""

    def _name(self, ticket: str) -> str:
        return f"{self._root}:ticket:{sha256(ticket.encode()).hexdigest()}"
