"""Reply streams: the answers to producers of the inbox, delivered at least once.

Holds: a producer's name cannot address any other key; an answer with the same id and event is a duplicate.
Keys: `deck:replies:<name>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from broker.coordination import Quarantine
from broker.runtime import StoreRefused
from broker.store import Argument, Store, keys

VERSION = "1"
KEPT_REPLIES = 100_000
KEPT_SECONDS = 7 * 24 * 3600
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NUMBERS = {"accepted": 1, "rejected": 1, "settled": 2}
"""The number of an answer among those to one entry."""

ReplyEvent = Literal["accepted", "rejected", "settled"]


class Replies:
    """The reply streams of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._unreadable = Quarantine(store)

    async def send(
        self, name: str, request_id: str, event: ReplyEvent, *, conversation_id: str = "", content: Mapping[str, Any]
    ) -> None:
        """Send an answer to a producer. If the store's reply is lost, it may be sent twice.

        A key of another type in the place of the stream is renamed.
        """
        stream = keys.replies_key(name)
        fields: dict[str, Argument] = {"v": VERSION, "id": request_id, "event": event, "n": NUMBERS[event]}
        fields |= {"conversation_id": conversation_id, "json": json.dumps(content)}
        flat: list[Argument] = [part for field in fields.items() for part in field]
        commands: list[tuple[Argument, ...]] = [
            ("XADD", stream, "MAXLEN", "~", KEPT_REPLIES, "*", *flat),
            ("EXPIRE", stream, KEPT_SECONDS),
        ]
        try:
            await self._store.call_many(commands)
        except StoreRefused as error:
            if "WRONGTYPE" not in error.message:
                raise
            await self._unreadable.move_away(stream, "stream", error)  # producer names have no colon
            await self._store.call_many(commands)
