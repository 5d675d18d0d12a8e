"""The log of each conversation: append, read, tail, fork.

Holds: event ids are 1, 2, 3 … without gaps; everything goes through the function `append`, whose outcomes are types
(`append_outcomes`); an append whose reply is lost is repeated until its outcome is known, and is not written twice.
Does not: trim a live log.
Keys: `deck:{k}:c:<id>:events`, and the conversation's blobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from broker import codec
from broker.append_outcomes import Appended as Appended  # noqa: PLC0414  (whoever appends gets them from here)
from broker.append_outcomes import Closed as Closed  # noqa: PLC0414
from broker.append_outcomes import Conflict as Conflict  # noqa: PLC0414
from broker.append_outcomes import Duplicate as Duplicate  # noqa: PLC0414
from broker.append_outcomes import Fenced as Fenced  # noqa: PLC0414
from broker.append_outcomes import Outcome as Outcome  # noqa: PLC0414
from broker.append_outcomes import outcome_of
from broker.blobs import Blobs
from broker.connection import Argument
from broker.errors import CorruptEntry, EventsLost, StoreTooNew, UnknownConversation, UsageError
from broker.events import ConversationCreated, Event, replace_surrogates
from broker.ids import check_conversation_id, new_key
from broker.masking import Masker
from broker.ownership import Ownership
from broker.secrets import Secrets
from broker.standing import listed
from broker.store import Store

NOTHING_TO_HIDE = Masker()
READ_BATCH = 1_000
TAIL_BLOCK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class News:
    """What an owner finds who has been rung.

    Attributes:
        is_watched: somebody looks on while replies are written; see `live_text`.
    """

    events: list[Event]
    is_watched: bool


class EventLog:
    """The logs of a store; `secrets` are hidden before anything is written, None: for a reader."""

    def __init__(self, store: Store, secrets: Secrets | None = None) -> None:
        self._store = store
        self.secrets = secrets
        self.blobs = Blobs(store)

    async def hide(self, conversation_id: str, events: Sequence[Event]) -> list[Event]:
        """Return events as they would be written, for an owner who goes on from them before they are."""
        masker = await self.masker(conversation_id)
        if not masker:
            return list(events)
        wires = await asyncio.to_thread(lambda: [masker.wire(event.wire()) for event in events])
        return [codec.event_from_wire(wire, event.id) for wire, event in zip(wires, events, strict=True)]

    async def masker(self, conversation_id: str) -> Masker:
        """Return what hides the conversation's secrets in what is written of it."""
        return await self.secrets.masker(conversation_id) if self.secrets is not None else NOTHING_TO_HIDE

    async def create(
        self, created: ConversationCreated, events: Sequence[Event] = (), *, key: str | None = None, node: str = ""
    ) -> Appended | Duplicate:
        """Begin a conversation.

        Args:
            created: its first event.
            events: what follows at once, usually the first message.
            key: idempotency key; the same key for the same id is a `Duplicate`.
            node: where its workspace is to be; empty: wherever its first action is taken up.

        Raises:
            UsageError: the id cannot be used, or is taken by another conversation.
        """
        return await self._create([created, *events], key=key or new_key(), answers={}, node=node)

    async def _create(
        self,
        events: Sequence[Event],
        *,
        key: str,
        answers: Mapping[int, int],
        node: str = "",
        fields: Mapping[str, str | int | float] | None = None,
    ) -> Appended | Duplicate:
        created = events[0]
        assert isinstance(created, ConversationCreated)
        cid = check_conversation_id(created.conversation_id)
        shown = {
            "title": created.title,
            "agent": created.agent.name,
            "state": "loading",
            "workspace": created.workspace.model_dump_json(),
        } | ({"node": node} if node else {})
        outcome = await self._append(
            cid,
            ("create", key, created.workspace.pool, ""),
            events,
            answers=answers,
            fields={**shown, **(fields or {})},
        )
        if outcome is None:
            raise UsageError(f"There is a conversation with the id {cid!r} already.", remedy="Choose another id.")
        assert isinstance(outcome, Appended | Duplicate)
        return outcome

    async def append(
        self, conversation_id: str, events: Sequence[Event], *, key: str | None = None, quiet: bool = False
    ) -> Appended | Duplicate | Closed:
        """Append as a producer: a person, a client, another conversation.

        Args:
            conversation_id: an existing conversation.
            events: at least one; appended together.
            key: idempotency key; without one, a new one is made, which makes this call repeatable but no other.
            quiet: ring nobody.

        Raises:
            UnknownConversation: no such conversation.
        """
        guard = ("producer", key or new_key(), "", "")
        outcome = await self._append(conversation_id, guard, events, flags="quiet" if quiet else "")
        assert isinstance(outcome, Appended | Duplicate | Closed)
        return outcome

    async def append_observation(
        self, conversation_id: str, observation: Event, *, worker_id: str, place: str = ""
    ) -> Appended | Duplicate | Closed:
        """Append the one observation of the action `observation.cause`, as a tool worker.

        Args:
            place: the action's entry, `<stream>|<entry>`, acknowledged in the same step whatever the outcome.
        """
        assert observation.cause is not None
        guard = ("tool", worker_id, str(observation.cause), place)
        outcome = await self._append(conversation_id, guard, [observation], answers={0: observation.cause})
        assert isinstance(outcome, Appended | Duplicate | Closed)
        return outcome

    async def append_as_owner(
        self,
        ownership: Ownership,
        events: Sequence[Event],
        *,
        expected_last_id: int,
        dispatch: Iterable[int] = (),
        answers: Mapping[int, int] | None = None,
        cancels: Sequence[int] = (),
        fields: Mapping[str, str | int | float] | None = None,
    ) -> Outcome:
        """Append what the owner decided on the ground of the log up to `expected_last_id`.

        Args:
            dispatch: positions in `events` of actions to be put on their action stream at once.
            answers: position in `events` → the runnable action that this observation settles.
            cancels: ids of running actions to be stopped; 0: all programs of the workspace.
            fields: what a listing shows of the conversation.

        Raises:
            EventsLost: the log ends before `expected_last_id`.
        """
        guard = ("owner", ownership.worker_id, ownership.token, str(expected_last_id))
        outcome = await self._append(
            ownership.conversation_id,
            guard,
            events,
            flags=new_key(),
            dispatch=frozenset(dispatch),
            answers=answers or {},
            cancels=cancels,
            fields=fields or {},
        )
        assert outcome is not None
        if isinstance(outcome, Conflict) and outcome.last_id < expected_last_id:
            raise EventsLost(ownership.conversation_id, outcome.last_id, expected_last_id)
        return outcome

    async def read(self, conversation_id: str, *, after: int = 0, until: int | None = None) -> list[Event]:
        """Return the events with ids above `after`, up to and including `until`, in order.

        Raises:
            CorruptEntry: an entry is damaged or missing; names the event.
            UnknownConversation: no such conversation.
        """
        events: list[Event] = []
        stream = self._store.keys(conversation_id).events
        end = "+" if until is None else f"{until}-0"
        while True:
            start = f"{after + len(events) + 1}-0"
            batch = await self._store.persist(
                lambda start=start: self._store.connection.call(  # type: ignore[misc]
                    "XRANGE", stream, start, end, "COUNT", READ_BATCH
                )
            )
            for entry_id, fields in batch:
                events.append(_decode(entry_id, fields, after + len(events) + 1))
            if len(batch) < READ_BATCH:
                break
        if not events and after == 0:
            await self.last_id(conversation_id)
        return events

    async def news(self, ownership: Ownership, *, after: int) -> News:
        """Return the events above `after`, as the owner who has been rung: later appends ring again."""
        names = self._store.keys(ownership.conversation_id)
        _, batch, is_watched = await self._store.persist(
            lambda: self._store.connection.call_many(
                [
                    ("HDEL", names.meta, "rung"),
                    ("XRANGE", names.events, f"{after + 1}-0", "+", "COUNT", READ_BATCH),
                    ("EXISTS", names.watched),
                ]
            )
        )
        events = [_decode(entry_id, fields, after + n) for n, (entry_id, fields) in enumerate(batch, 1)]
        if len(batch) == READ_BATCH:
            events += await self.read(ownership.conversation_id, after=after + READ_BATCH)
        return News(events, bool(is_watched))

    async def tail(self, conversation_id: str, *, after: int = 0) -> AsyncIterator[Event]:
        """Yield the events above `after`, then each new one as it is appended; never ends by itself.

        Raises:
            UnknownConversation: no such conversation, or no longer.
            EventsLost: the log ends before `after`, or before an event that has been yielded.
        """
        await self._check_end(conversation_id, after)
        stream = self._store.keys(conversation_id).events
        connection = self._store.connection.another(reply_timeout_seconds=TAIL_BLOCK_SECONDS + 5)
        command: tuple[Argument, ...] = ("XREAD", "COUNT", 100, "BLOCK", int(TAIL_BLOCK_SECONDS * 1000), "STREAMS")
        try:
            while True:
                found = await self._store.persist(
                    lambda: connection.call(*command, stream, f"{after}-0")  # noqa: B023  (awaited at once)
                )
                if not found:
                    await self._check_end(conversation_id, after)  # an emptied store has no news either
                for entry_id, fields in found[0][1] if found else ():
                    after += 1
                    yield _decode(entry_id, fields, after)
        finally:
            await connection.aclose()

    async def _check_end(self, conversation_id: str, known_id: int) -> None:
        last_id = await self.last_id(conversation_id)
        if last_id < known_id:
            raise EventsLost(conversation_id, last_id, known_id)

    async def last_id(self, conversation_id: str) -> int:
        """Return the id of the last event.

        Raises:
            UnknownConversation: no such conversation.
        """
        meta = self._store.keys(conversation_id).meta
        found = await self._store.persist(lambda: self._store.connection.call("HGET", meta, "last_id"))
        if found is None:
            raise UnknownConversation(conversation_id)
        return int(found)

    async def moves(self, conversation_id: str) -> int:
        """Return how often the workspace was taken off a lost node."""
        meta = self._store.keys(conversation_id).meta
        return int(await self._store.persist(lambda: self._store.connection.call("HGET", meta, "moves")) or 0)

    async def is_answered(self, conversation_id: str, action_id: int) -> bool:
        """Say whether an action has its observation, or never will because its conversation is gone."""
        names = self._store.keys(conversation_id)
        commands = [("HGET", names.once, f"o:{action_id}"), ("HGET", names.meta, "last_id")]
        answer, last_id = await self._store.persist(lambda: self._store.connection.call_many(commands))
        return answer is not None or last_id is None

    async def entry(self, conversation_id: str, event_id: int) -> bytes:
        """Return the stored bytes of one event.

        Raises:
            CorruptEntry: there is no such event.
        """
        stream, name = self._store.keys(conversation_id).events, f"{event_id}-0"
        found = await self._store.persist(lambda: self._store.connection.call("XRANGE", stream, name, name))
        if not found:
            raise CorruptEntry(f"Event {event_id} is missing from the log.")
        entry: bytes = found[0][1][1]
        return entry

    async def fork(self, source_id: str, target: ConversationCreated, *, at: int) -> Appended | Duplicate:
        """Begin a conversation with the events 2 to `at` of another; `target` takes the place of the first.

        Idempotent: the same target id and point give the same conversation.

        Raises:
            UsageError: `at` is not an event of the source.
        """
        events = await self.read(source_id, until=at)
        if len(events) != at:
            raise UsageError(
                f"The conversation {source_id!r} has {len(events)} events; it cannot be forked at {at}.",
                remedy=f"Choose an event from 1 to {len(events)}.",
            )
        whole = [await self.blobs.whole(source_id, event) for event in events[1:]]
        return await self.adopt(target, whole, key=f"fork:{source_id}@{at}")

    async def adopt(self, created: ConversationCreated, events: Sequence[Event], *, key: str) -> Appended | Duplicate:
        """Begin a conversation with events that another log has, in this store or elsewhere.

        Idempotent: the same id and key give the same conversation.

        Args:
            events: whole, in order, with the ids from 2 on.

        Raises:
            UsageError: the id cannot be used, or is taken by another conversation.
        """
        runnable = {event.id for event in events if event.runnable}
        # What has run there must not run again here.
        answers = {n: event.cause for n, event in enumerate(events, 1) if event.cause in runnable}
        return await self._create([created, *events], key=key, answers=answers, fields=listed(events))

    async def _append(
        self,
        conversation_id: str,
        guard: tuple[str, str, str, str],
        events: Sequence[Event],
        *,
        flags: str = "",
        dispatch: frozenset[int] = frozenset(),
        answers: Mapping[int, int] | None = None,
        cancels: Sequence[int] = (),
        fields: Mapping[str, str | int | float] | None = None,
    ) -> Outcome | None:
        names = self._store.keys(conversation_id)
        masker = await self.masker(conversation_id)
        arguments: list[Argument] = [conversation_id, *guard, flags, len(fields or {})]
        for field, value in (fields or {}).items():
            arguments += (field, replace_surrogates(masker.wire(value)))
        arguments += (len(cancels), *cancels, len(events))
        for position, event in enumerate(events):
            entry = await self._entry(conversation_id, event, masker)
            answered = (answers or {}).get(position, "")
            arguments += (entry, _route(event) if position in dispatch else "", answered)
        reply = await self._store.function("deck_append", (names.root, names.shard.root), *arguments)
        if reply == ["missing"]:
            raise UnknownConversation(conversation_id)
        return None if reply == ["exists"] else outcome_of(reply)

    async def _entry(self, conversation_id: str, event: Event, masker: Masker) -> bytes:
        wire = event.wire()
        if masker:
            # A megabyte takes a tenth of a second, in which other conversations go on.
            wire = await asyncio.to_thread(masker.wire, wire)
        if event.timestamp is None:
            wire["timestamp"] = self._store.clock.now().isoformat()
        entry, contents = codec.to_entry(wire)
        if contents:
            await self.blobs.keep(conversation_id, contents)
        return entry


def _route(event: Event) -> str:
    return f"pool:{event.pool_wanted}" if event.pool_wanted else "1"


def _decode(entry_id: bytes, fields: list[Any], expected_id: int) -> Event:
    if entry_id != b"%d-0" % expected_id:
        found = entry_id.partition(b"-")[0].decode()
        raise CorruptEntry(f"Event {expected_id} is missing from the log; the next one is {found}.")
    try:
        return codec.decode(_only_field(fields), expected_id)
    except CorruptEntry as error:
        raise CorruptEntry(
            f"Event {expected_id} cannot be read: {error.message}", remedy="Restore the store from its last good copy."
        ) from error
    except StoreTooNew as error:
        raise StoreTooNew(f"Event {expected_id} cannot be read: {error.message}", remedy=error.remedy) from error


def _only_field(fields: list[Any]) -> bytes:
    if len(fields) != 2 or fields[0] != b"e":
        raise CorruptEntry("Its entry has not the one field that an event has.")
    entry: bytes = fields[1]
    return entry
