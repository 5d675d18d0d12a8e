"""Quarantine for unreadable data: entries without their fields, bytes that are not text, and keys of another type.

Every reader of a stream quarantines an unusable entry here and reads the next one. The store's functions do the same;
they also move a key of another type away, to `<key>:unreadable`, or to `{<key>}:unreadable` if it has no hash tag.

Holds: an entry is recorded with its first bytes before it is acknowledged. About a thousand of the latest are kept.
Keys: `deck:{k}:unreadable`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from broker.runtime import CorruptEntry, StoreRefused, UsageError, check_conversation_id
from broker.store import Argument, Connection, ConversationKeys, ShardKeys, Store, decode_fields

PARSE_ERRORS = (LookupError, ValueError, UsageError, CorruptEntry)
"""The errors of parsing an entry's fields."""
MAX_RECORDS = 1_000
MAX_SHOWN_BYTES = 1_000
MAX_REASON_CHARS = 200
DISCARD_BATCH = 500
NAME = re.compile(r"([0-9]{1,9}):([0-9]{1,20}-[0-9]{1,20})")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QuarantinedItem:
    """A quarantined item.

    Attributes:
        entry_id: id of a stream's entry, or member of a set; empty for a whole key.
        held: its first bytes.
        name: name of this record: `<shard>:<its entry in deck:{k}:unreadable>`.
    """

    key: str
    entry_id: str
    why: str
    held: str
    name: str = ""


class Quarantine:
    """The quarantine of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def quarantine(
        self, names: ShardKeys, key: str, entry_id: str, fields: Sequence[bytes], error: Exception, *, group: str = ""
    ) -> None:
        """Record an entry that cannot be read, and acknowledge it.

        Args:
            group: the consumer group that it was delivered to; empty for none.
        """
        why = (
            f"it has no field {error}"
            if isinstance(error, LookupError)
            else " ".join(str(error).split())[:MAX_REASON_CHARS]
        )
        _log.warning("entry %s of %s cannot be read and was quarantined: %s", entry_id, key, ascii(why))
        held = b" ".join(part[:MAX_SHOWN_BYTES] for part in fields[:16])[:MAX_SHOWN_BYTES]
        note = ("key", key, "id", entry_id, "why", why, "held", held)
        commands: list[tuple[Argument, ...]] = [("XADD", names.quarantine, "MAXLEN", "~", MAX_RECORDS, "*", *note)]
        commands += [("XACK", key, group, entry_id)] if group else []
        with suppress(StoreRefused):  # it is recorded; the key itself may have been overwritten meanwhile
            await self._store.call_many(commands)

    async def remove(self, names: ShardKeys, key: str, member: bytes, error: Exception) -> None:
        """Record a member of a sorted set that cannot be read, and remove it so that it does not block others."""
        await self.quarantine(names, key, member.decode(errors="backslashreplace")[:MAX_REASON_CHARS], (), error)
        with suppress(StoreRefused):
            await self._store.call("ZREM", key, member)

    async def move_away(self, key: str, kind: str, error: Exception) -> None:
        """Move a key that is not of type `kind` to `<key>:unreadable`, and record it. Other keys stay.

        Atomic: a second call must not move the key that has replaced it. A key without a hash tag is moved first, and
        recorded afterwards in the first shard.
        """
        _log.warning("%s has the wrong type and is moved away: %s", key, error)
        root, is_tagged, _ = key.partition("}:")
        if is_tagged:
            await self._store.call_function("deck_keep_kind", (key, f"{root}}}"), kind)
            return
        outcome, *why = await self._store.call_function("deck_keep_kind", (key,), kind)
        if outcome == "moved":
            note = ("key", key, "id", "", "why", why[0], "held", "")
            quarantine = self._store.all_shards[0].quarantine
            await self._store.call("XADD", quarantine, "MAXLEN", "~", MAX_RECORDS, "*", *note)

    async def list_items(self) -> list[QuarantinedItem]:
        """Return the quarantined items, oldest first within a shard."""
        return await self._store.retry(lambda: list_quarantined(self._store.connection, self._store.all_shards))

    async def discard(self, names: Sequence[str]) -> int:
        """Delete records by name, and return how many existed. Idempotent.

        Raises:
            UsageError: a name is not that of a record.
        """
        places = [await self._parse_name(name) for name in names]
        gone = 0
        for at in range(0, len(places), DISCARD_BATCH):
            commands = [("XDEL", key, entry_id) for key, entry_id in places[at : at + DISCARD_BATCH]]
            gone += sum(await self._store.call_many(commands))
        return gone

    async def _parse_name(self, name: str) -> tuple[str, str]:
        """Return the stream and the entry of a record."""
        found = NAME.fullmatch(name)
        if found is None or int(found[1]) >= len(shards := await self._store.load_shards()):
            raise UsageError(
                f"There is no unreadable entry {ascii(name)[:100]}.", remedy="`deckhands dead ls` lists them."
            )
        return shards[int(found[1])].quarantine, found[2]


async def list_quarantined(connection: Connection, shards: Sequence[ShardKeys]) -> list[QuarantinedItem]:
    """Return the quarantined items, for callers that only inspect a store; see `Quarantine.list_items`."""
    replies = await connection.call_many([("XRANGE", names.quarantine, "-", "+") for names in shards])
    found = []
    for names, entries in zip(shards, replies, strict=True):
        for entry_id, flat in entries:
            fields = decode_fields(flat)
            key, its_id, why, held = (fields.get(name, "") for name in ("key", "id", "why", "held"))
            found.append(QuarantinedItem(key, its_id, why, held, f"{names.shard}:{entry_id.decode()}"))
    return found


async def find_conversation_keys(store: Store, names: ShardKeys, conversation_id: bytes) -> ConversationKeys:
    """Return the keys of the conversation that an entry of this shard names.

    Raises:
        ValueError: it is not text, or belongs to another shard, and cannot be acknowledged from here.
        UsageError: it is not a valid conversation id.
    """
    named = check_conversation_id(conversation_id.decode())
    found = await store.locate(named, seen_in=names)
    if found.shard != names and await store.has_moved(found):
        found = await store.locate(named, seen_in=names)
    if found.shard != names:
        raise ValueError(f"the conversation {found.conversation_id!r} is not of this shard")
    return found
