"""Reply streams: the answers to producers of the inbox, each at least once.

Holds: a name cannot name any other key; the same id and event is the same answer once more.
Keys: `deck:replies:<name>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from broker.coordination import Unreadable
from broker.runtime import StoreRefused
from broker.store import Argument, Store, keys

VERSION = "1"
KEPT_REPLIES = 100_000
KEPT_SECONDS = 7 * 24 * 3600
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NUMBERS = {"accepted": 1, "rejected": 1, "settled": 2}
"""Which answer to one entry it is."""

ReplyEvent = Literal["accepted", "rejected", "settled"]


class Replies:
    """The reply streams of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._unreadable = Unreadable(store)

    async def send(
        self, name: str, request_id: str, event: ReplyEvent, *, conversation_id: str = "", content: Mapping[str, Any]
    ) -> None:
        """Tell a producer something; a lost reply of the store may send it twice.

        A key of another type that stands where the stream belongs is moved out of the way.
        """
        stream = keys.replies(name)
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
            await self._unreadable.move_away(stream, "stream", error)  # no name of a producer has a colon
            await self._store.call_many(commands)
