"""The reading side of the log of each conversation: read, tail, look up; `event_log` writes.

Holds: events are returned in order and without gaps; a missing one is `CorruptEntry`. A reader imports nothing that
writes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from broker.contract import ConversationCreated, Event, Ownership, WorkspaceSpec, codec
from broker.log.blobs import Blobs
from broker.log.entries import NewEvents, find_cipher_of, find_reader, is_first_entry, parse_entries, parse_entry
from broker.log.follower import LogFollower, check_event_exists
from broker.runtime import Acks, CorruptEntry, EventsLost, StoreMisconfigured, UnknownConversation
from broker.store import Cipher, Store

READ_BATCH = 1_000


@dataclass(frozen=True, slots=True)
class NotedAction:
    """The record of an action that is kept beside the log.

    Attributes:
        checksum: checksum of its entry; empty if an earlier version dispatched or settled it.
        fingerprint: as workspace hosts know it; empty unless a tool worker has settled it.
    """

    checksum: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class EntryPage:
    """Consecutive entries of a log, as stored.

    Attributes:
        after: the id of the event before the first of them.
        cipher: decrypts them; None if they are not encrypted.
    """

    entries: Sequence[Any]
    after: int
    cipher: Cipher | None

    def decode(self, decode: codec.Decoder = codec.decode) -> list[Event]:
        """Return their events; raises CorruptEntry if one is damaged or missing."""
        return parse_entries(self.entries, self.after, decode, self.cipher)


class LogReader:
    """The logs of a store, to read."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.blobs = Blobs(store)

    async def read(
        self, conversation_id: str, *, after: int = 0, until: int | None = None, decode: codec.Decoder = codec.decode
    ) -> list[Event]:
        """Return the events with ids above `after`, up to and including `until`, in order.

        Args:
            decode: pass `decode_any` if events are only displayed.

        Raises:
            CorruptEntry: an entry is damaged or missing. The message names the event.
            UnknownConversation: no such conversation.
        """
        pages = self.read_pages(conversation_id, after=after, until=until, decode=decode)
        return [event async for page in pages for event in page]

    async def read_pages(
        self,
        conversation_id: str,
        *,
        after: int = 0,
        until: int | None = None,
        decode: codec.Decoder = codec.decode,
        first_size: int | None = None,
    ) -> AsyncGenerator[list[Event], None]:
        """Yield the events that `read` returns, in pages of a thousand. Raises the same errors.

        Args:
            first_size: the size of the first page; None: a thousand. A small one is read sooner, but costs a round
                trip.
        """
        pages = self.read_entries(conversation_id, after=after, until=until, first_size=first_size)
        async for page in pages:
            yield page.decode(decode)

    async def read_entries(
        self,
        conversation_id: str,
        *,
        after: int = 0,
        until: int | None = None,
        first_size: int | None = None,
        size: int = READ_BATCH,
    ) -> AsyncGenerator[EntryPage, None]:
        """Yield the pages of `read_pages` without decoding them, so that a thread can do it.

        Args:
            size: the size of all pages but the first.
        """
        stream = (await self.store.locate(conversation_id)).events
        end = "+" if until is None else f"{until}-0"
        last_id, next_size = after, first_size or size
        while True:
            batch = await self.store.call("XRANGE", stream, f"{last_id + 1}-0", end, "COUNT", next_size)
            if batch:
                yield EntryPage(batch, last_id, await find_reader(self.store, conversation_id, batch))
                last_id += len(batch)
            if len(batch) < next_size:
                break
            next_size = size
        if last_id == 0:
            await self.load_last_id(conversation_id)
            if (await self.store.locate(conversation_id)).events != stream:  # it was created again, elsewhere
                async for page in self.read_entries(conversation_id, until=until, size=size):
                    yield page

    async def read_new(
        self, ownership: Ownership, *, after: int, checksum: str = "", with_snapshot: bool = False
    ) -> NewEvents:
        """Return the events above `after` for the owner, and enable its next notification.

        Args:
            checksum: checksum of the event `after`; empty to accept any event with that id.
            with_snapshot: also return the latest snapshot, without a further round trip.

        Raises:
            EventsLost: the log does not hold that event.
        """
        names = await self.store.locate(ownership.conversation_id)
        events: list[Event] = []
        last_id = after
        further = [("GET", names.snapshot)] if with_snapshot else []
        while True:
            _, batch, is_watched, *snapshot = await self.store.call_many(
                [
                    ("HDEL", names.meta, "rung"),
                    ("XRANGE", names.events, f"{max(last_id, 1)}-0", "+", "COUNT", READ_BATCH),
                    ("EXISTS", names.watcher_mark),
                    *further,
                ]
            )
            if last_id and not is_first_entry(batch[:1], last_id, checksum):
                found = await self.load_last_id(ownership.conversation_id)
                raise EventsLost(ownership.conversation_id, found, last_id, checksum)
            new = batch[1:] if last_id else batch
            cipher = await find_reader(self.store, ownership.conversation_id, new)
            events += parse_entries(new, last_id, cipher=cipher)
            last_id += len(new)
            checksum = codec.checksum_of(batch[-1][1][-1]) if batch else ""
            if len(batch) < READ_BATCH:
                return NewEvents(events, bool(is_watched), checksum, *snapshot)

    async def tail(
        self, conversation_id: str, *, after: int = 0, decode: codec.Decoder = codec.decode
    ) -> AsyncIterator[Event]:
        """Yield the events above `after`, then each new event when it is appended. Never ends by itself. See `read`.

        Raises:
            UnknownConversation: the conversation does not exist, or was deleted meanwhile.
            EventsLost: the log ends before `after`, or no longer holds an event that was yielded.
        """
        follower = LogFollower(self.store, conversation_id, after)
        try:
            await follower.check_start()
            while True:
                batch = await follower.read()
                cipher = await find_reader(self.store, conversation_id, batch)
                for entry_id, fields in batch:
                    after += 1
                    yield parse_entry(entry_id, fields, after, decode, cipher)
        finally:
            await follower.aclose()

    async def load_last_id(self, conversation_id: str) -> int:
        """Return the id of the last event.

        Raises:
            UnknownConversation: no such conversation.
        """
        names = await self.store.locate(conversation_id)
        found = await self.store.call("HGET", names.meta, "last_id")
        if found is not None:
            return int(found)
        if await self.store.has_moved(names):
            return await self.load_last_id(conversation_id)
        raise UnknownConversation(conversation_id)

    async def load_acks(self, conversation_id: str) -> Acks | None:
        """Return when an event of a conversation counts as written; None: as its store demands."""
        found = await self.store.call("HGET", (await self.store.locate(conversation_id)).meta, "acks")
        levels: dict[bytes | None, Acks] = {b"disk": "disk", b"replica": "replica"}
        return levels.get(found)

    async def count_moves(self, conversation_id: str) -> int:
        """Return how often the workspace was moved away from a lost node."""
        meta = (await self.store.locate(conversation_id)).meta
        return int(await self.store.call("HGET", meta, "moves") or 0)

    async def load_tenant(self, conversation_id: str) -> str:
        """Return the tenant of a conversation; empty if it has none."""
        found = await self.store.call("HGET", (await self.store.locate(conversation_id)).meta, "tenant")
        return (found or b"").decode(errors="backslashreplace")

    async def load_workspace(self, conversation_id: str) -> WorkspaceSpec:
        """Return the workspace of a conversation, as in its first event."""
        found = await self.store.call("HGET", (await self.store.locate(conversation_id)).meta, "workspace")
        return WorkspaceSpec.model_validate_json(found or b"{}")

    async def load_origin(self, conversation_id: str) -> str:
        """Return the origin of a fork, as in its first event; empty if it is no fork."""
        meta = (await self.store.locate(conversation_id)).meta
        used, origin = await self.store.call("HMGET", meta, "used", "forked_from")
        if used is None:  # created by an earlier version, which has not noted it
            with suppress(StoreMisconfigured):  # a tool worker may not read the log
                created = (await self.read(conversation_id, until=1))[0]
                return (isinstance(created, ConversationCreated) and created.forked_from) or ""
        return (origin or b"").decode(errors="backslashreplace")

    async def is_workspace_used(self, conversation_id: str) -> bool:
        """Return whether an event has read or changed the workspace, or may have."""
        found = await self.store.call("HGET", (await self.store.locate(conversation_id)).meta, "used")
        return bool(found != b"0")

    async def find_action(self, conversation_id: str, action_id: int) -> NotedAction | None:
        """Return the store's record of an action; None if there is none."""
        names = await self.store.locate(conversation_id)
        fields = [f"{kind}:{action_id}" for kind in "koq"]
        last_id, (dispatched, settled, carrier) = await self.store.call_many(
            [("HGET", names.meta, "last_id"), ("HMGET", names.once, *fields)]
        )
        if last_id is None and await self.store.has_moved(names):
            return await self.find_action(conversation_id, action_id)
        if last_id is None:
            raise UnknownConversation(conversation_id)
        if dispatched is not None:
            return NotedAction(dispatched.decode(errors="replace"), "")
        if settled is None:
            return None if carrier is None else NotedAction("", "")
        noted: list[str] = settled.decode(errors="replace").split(":")[2:]
        return NotedAction(*[*noted, "", ""][:2])

    async def check_action(self, conversation_id: str, action_id: int, checksum: str) -> None:
        """Check that the log still holds an action, without reading the log if the store has noted the action.

        Raises:
            EventsLost: the log does not hold it.
            UnknownConversation: the conversation does not exist, or was deleted.
        """
        noted = await self.find_action(conversation_id, action_id)
        if noted is not None and noted.checksum:
            is_there = noted.checksum == checksum
        else:
            is_there = noted is not None
            with suppress(StoreMisconfigured):  # a tool worker may not read the log
                await check_event_exists(self.store, conversation_id, action_id, checksum)
                is_there = True
        if not is_there:
            raise EventsLost(conversation_id, await self.load_last_id(conversation_id), action_id, checksum)

    async def is_answered(self, conversation_id: str, action_id: int) -> bool:
        """Return whether an action has its observation, or can never get one because its conversation is gone."""
        names = await self.store.locate(conversation_id)
        commands = [("HGET", names.once, f"o:{action_id}"), ("HGET", names.meta, "last_id")]
        answer, last_id = await self.store.call_many(commands)
        return answer is not None or last_id is None

    async def load_entry(self, conversation_id: str, event_id: int) -> bytes:
        """Return the stored bytes of one event.

        Raises:
            CorruptEntry: there is no such event.
        """
        stream = (await self.store.locate(conversation_id)).events
        name = f"{event_id}-0"
        found = await self.store.call("XRANGE", stream, name, name)
        if not found:
            raise CorruptEntry(f"Event {event_id} is missing from the log.")
        entry: bytes = found[0][1][1]
        return entry

    async def decode_entry(self, conversation_id: str, entry: bytes, event_id: int) -> Event:
        """Decode the stored bytes of an event, as `load_entry` returns them or an action stream delivers them.

        Raises:
            CorruptEntry, UnknownKind, StoreTooNew: see `codec.decode`.
            DataLocked: it is encrypted, and this process has no key for it.
        """
        return codec.decode(await self.decrypt_entry(conversation_id, entry, event_id), event_id)

    async def decrypt_entry(self, conversation_id: str, entry: bytes, event_id: int) -> bytes:
        """Return the stored bytes of an event without their encryption, if any; raises CorruptEntry or DataLocked."""
        return codec.decrypt_entry(entry, await find_cipher_of(self.store, conversation_id, entry), event_id)
