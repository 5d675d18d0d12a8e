"""What cannot be read: entries without their fields, or with bytes that are not text, and keys of another type.

Whatever reads a stream puts an entry that it cannot use aside, here, and reads the next one; so do the functions, which
also move a key of another type out of the way, to `<key>:unreadable`.

Holds: an entry is noted with its first bytes before it is acknowledged; the latest thousand or so are kept.
Keys: `deck:{k}:unreadable`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from broker.runtime import CorruptEntry, StoreRefused, UsageError, check_conversation_id
from broker.store import Argument, Connection, ConversationKeys, ShardKeys, Store, texts_by_name

CANNOT_BE_READ = (LookupError, ValueError, UsageError, CorruptEntry)
"""What reading the fields of an entry raises."""
KEPT = 1_000
SHOWN_BYTES = 1_000
WHY_CHARS = 200
DISCARDED_AT_ONCE = 500
NAME = re.compile(r"([0-9]{1,9}):([0-9]{1,20}-[0-9]{1,20})")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnreadableEntry:
    """Something that was put aside.

    Attributes:
        entry_id: of a stream's entry, or the member of a set; empty for a whole key.
        held: the beginning of what it held.
        name: names this note: `<shard>:<its entry in deck:{k}:unreadable>`.
    """

    key: str
    entry_id: str
    why: str
    held: str
    name: str = ""


class Unreadable:
    """What was put aside in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put_aside(
        self, names: ShardKeys, key: str, entry_id: str, fields: Sequence[bytes], error: Exception, *, group: str = ""
    ) -> None:
        """Note an entry that cannot be read, and acknowledge it.

        Args:
            group: the consumer group that it was delivered to; empty: none.
        """
        why = f"it has no field {error}" if isinstance(error, LookupError) else " ".join(str(error).split())[:WHY_CHARS]
        _log.warning("entry %s of %s cannot be read and was put aside: %s", entry_id, key, ascii(why))
        held = b" ".join(part[:SHOWN_BYTES] for part in fields[:16])[:SHOWN_BYTES]
        note = ("key", key, "id", entry_id, "why", why, "held", held)
        commands: list[tuple[Argument, ...]] = [("XADD", names.unreadable, "MAXLEN", "~", KEPT, "*", *note)]
        commands += [("XACK", key, group, entry_id)] if group else []
        with suppress(StoreRefused):  # it is in the log; this very key may just have been overwritten
            await self._store.call_many(commands)

    async def remove(self, names: ShardKeys, key: str, member: bytes, error: Exception) -> None:
        """Note a member of a sorted set that cannot be read, and remove it, so that it keeps no other from its turn."""
        await self.put_aside(names, key, member.decode(errors="backslashreplace")[:WHY_CHARS], (), error)
        with suppress(StoreRefused):
            await self._store.call("ZREM", key, member)

    async def move_away(self, key: str, kind: str, error: Exception) -> None:
        """Move a key out of the way that is no `kind`, to `<key>:unreadable`, and note it; leave any other alone.

        One step of the store: a second one must not move what has come in its place.
        """
        _log.warning("%s cannot be used and is moved out of the way: %s", key, error)
        await self._store.function("deck_keep_kind", (key, self._store.all_shards[0].root), kind)

    async def all(self) -> list[UnreadableEntry]:
        """Return what was put aside, the oldest first within a shard."""
        return await self._store.persist(lambda: entries_aside(self._store.connection, self._store.all_shards))

    async def discard(self, names: Sequence[str]) -> int:
        """Forget notes by their names, and return how many there were. Idempotent.

        Raises:
            UsageError: one is not the name of a note.
        """
        places = [self._place(name) for name in names]
        gone = 0
        for at in range(0, len(places), DISCARDED_AT_ONCE):
            commands = [("XDEL", key, entry_id) for key, entry_id in places[at : at + DISCARDED_AT_ONCE]]
            gone += sum(await self._store.call_many(commands))
        return gone

    def _place(self, name: str) -> tuple[str, str]:
        """Return the stream and the entry of a note."""
        found = NAME.fullmatch(name)
        if found is None or int(found[1]) >= self._store.shards:
            raise UsageError(
                f"There is no unreadable entry {ascii(name)[:100]}.", remedy="`deckhands dead ls` lists them."
            )
        return self._store.all_shards[int(found[1])].unreadable, found[2]


async def entries_aside(connection: Connection, shards: Sequence[ShardKeys]) -> list[UnreadableEntry]:
    """Return what was put aside, for callers that only look at a store; see `Unreadable.all`."""
    replies = await connection.call_many([("XRANGE", names.unreadable, "-", "+") for names in shards])
    found = []
    for names, entries in zip(shards, replies, strict=True):
        for entry_id, flat in entries:
            fields = texts_by_name(flat)
            key, its_id, why, held = (fields.get(name, "") for name in ("key", "id", "why", "held"))
            found.append(UnreadableEntry(key, its_id, why, held, f"{names.shard}:{entry_id.decode()}"))
    return found


def conversation_of(store: Store, names: ShardKeys, conversation_id: bytes) -> ConversationKeys:
    """Return the keys of the conversation that an entry of this shard names.

    Raises:
        ValueError: it is not text, or belongs to another shard, where nobody could acknowledge the entry.
        UsageError: it cannot be the id of a conversation.
    """
    found = store.keys(check_conversation_id(conversation_id.decode()))
    if found.shard != names:
        raise ValueError(f"the conversation {found.conversation_id!r} is not of this shard")
    return found
