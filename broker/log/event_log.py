"""The log of each conversation: append and fork; `log_reader` reads.

Holds: event ids are 1, 2, 3 … without gaps. All writes use the function `append`; its outcomes are types
(`append_call`). If the reply to an append is lost, the call is repeated until its outcome is known; the events are
written once. An id and a checksum identify an event, because a store that lost the end of a log assigns its ids again
(`lost_tails`). An event is masked once; an append masks it again only if the secrets have changed since.
Does not: trim a live log.
Keys: `deck:{k}:c:<id>:events`, and the conversation's blobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from broker.contract import (
    ConversationCreated,
    Event,
    Ownership,
    PartyStopped,
    StartWindow,
    WorkspaceUse,
    codec,
    replace_surrogates,
)
from broker.coordination import settle_results
from broker.log.append_call import (
    Appended,
    AppendOutcome,
    Closed,
    Condition,
    Conflict,
    Creator,
    Duplicate,
    Lost,
    NewEntry,
    Owner,
    ProducerWriter,
    ToolWriter,
    Writer,
    count_open_elsewhere,
    make_append_arguments,
    parse_outcome,
    raise_refusal,
)
from broker.log.blobs import split_into_chunks
from broker.log.log_reader import LogReader
from broker.log.status import make_copied_fields, make_initial_fields
from broker.runtime import (
    ConversationMoved,
    EventsLost,
    ShardsRaised,
    StoreError,
    UsageError,
    check_conversation_id,
    new_key,
)
from broker.secrets import Masker, Secrets, SecretsProof
from broker.store import Argument, Cipher, Store, encrypt_fields

MAX_LOOK_UPS = 8
"""How often an append reads the secrets again because they have changed."""


NO_MASKER = Masker()


@dataclass(frozen=True, slots=True)
class MaskedEvents:
    """Events with masked secrets, and the masker that was used."""

    events: tuple[Event, ...]
    masker: Masker

    @classmethod
    async def mask(cls, events: Sequence[Event], masker: Masker) -> MaskedEvents:
        """Mask events."""
        if not masker:
            return cls(tuple(events), masker)
        wires = await asyncio.to_thread(lambda: [masker.mask_wire(event.wire()) for event in events])
        found = [codec.event_from_wire(wire, event.id) for wire, event in zip(wires, events, strict=True)]
        return cls(tuple(found), masker)

    def is_masked(self, position: int, masker: Masker) -> bool:
        """Return whether these copies include the event at a position of the append, masked with the same secrets."""
        return position < len(self.events) and masker.values == self.masker.values


NO_MASKED_EVENTS = MaskedEvents((), NO_MASKER)


class EventLog(LogReader):
    """The logs of a store. `secrets` are masked in everything written; pass None for a reader."""

    def __init__(self, store: Store, secrets: Secrets | None = None) -> None:
        super().__init__(store)
        self.secrets = secrets

    async def mask(self, conversation_id: str, events: Sequence[Event]) -> MaskedEvents:
        """Mask the secrets in events, for an owner that folds them before `append_as_owner`."""
        if self.secrets is not None and self.secrets.may_be_evicted(conversation_id):
            await self.secrets.look_up(conversation_id)
        masker, _ = await self._load_checked_masker(conversation_id)
        return await MaskedEvents.mask(events, masker)

    async def load_masker(self, conversation_id: str) -> Masker:
        """Return the masker of the conversation's secrets."""
        return await self.secrets.load_masker(conversation_id) if self.secrets is not None else NO_MASKER

    async def _load_checked_masker(self, conversation_id: str) -> tuple[Masker, SecretsProof | None]:
        """Return the masker for an append and the secret values to check, see `Secrets.get_cached_masker`."""
        if self.secrets is None:
            return NO_MASKER, None
        return await self.secrets.get_cached_masker(conversation_id)

    async def create(
        self,
        created: ConversationCreated,
        events: Sequence[Event] = (),
        *,
        key: str | None = None,
        node: str = "",
        awaited: str = "",
        caller: Mapping[str, Argument] | None = None,
        start: StartWindow | None = None,
        shards: int | None = None,
    ) -> Appended | Duplicate:
        """Create a conversation.

        Args:
            created: its first event.
            events: further events of the same append, usually the first message.
            key: idempotency key; the same key for the same id gives a `Duplicate`.
            node: the node of its workspace; empty for the node that claims its first action.
            awaited: the caller to notify of its end: `celery` or `stream:<name>`; empty for none.
            caller: the fields of this caller, stored in the same step unless the conversation has one.
            start: when it may start; None for at once.
            shards: the number of shards when the caller stored data for the conversation; None if it stored none.

        Raises:
            UsageError: the id is invalid, or another conversation has it.
            AdmissionRefused: it may not start now. Never raised for a delegate.
            ShardsRaised: the store has more shards by now; see `Store.repeat_if_raised`.
        """

        async def create(shards: int) -> Appended | Duplicate:
            creator = Creator(key or new_key(), created.workspace.pool, awaited, start=start, caller=caller)
            return await self._create([created, *events], creator._replace(shards=shards), answers={}, node=node)

        repeat = self.store.repeat_if_raised
        return await (repeat(created.conversation_id, create) if shards is None else create(shards))

    async def _create(
        self,
        events: Sequence[Event],
        creator: Creator,
        *,
        answers: Mapping[int, int],
        node: str = "",
        fields: Mapping[str, str | int | float] | None = None,
        blobs: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Appended | Duplicate:
        created = events[0]
        assert isinstance(created, ConversationCreated)
        cid = check_conversation_id(created.conversation_id)
        if creator.shards != self.store.shards:
            raise ShardsRaised
        creator = creator._replace(elsewhere=await count_open_elsewhere(self.store, created))
        shown = make_initial_fields(created, node)
        shown |= {"double_texting": created.double_texting} if created.double_texting else {}
        shown |= {"acks": created.acks} if created.acks in ("disk", "replica") else {}
        shown |= {} if creator.start else {"busy": "1"}
        tenant = created.tenancy.tenant if created.tenancy is not None else ""
        cipher = await self.store.encryption.create_cipher(cid, tenant)
        shown |= {"data_key": cipher.key_id.decode()} if cipher is not None else {}
        outcome = await self._append(
            cid, creator, events, answers=answers, fields={**shown, **(fields or {})}, cipher=cipher, blobs=blobs
        )
        if outcome is None:
            raise UsageError(f"There is a conversation with the id {cid!r} already.", remedy="Choose another id.")
        assert isinstance(outcome, Appended | Duplicate)
        return outcome

    async def append(
        self,
        conversation_id: str,
        events: Sequence[Event],
        *,
        key: str | None = None,
        quiet: bool = False,
        condition: Condition = "",
        seen_id: int | None = None,
        cause: tuple[int, str] | None = None,
        dispatch: Iterable[int] = (),
        fields: Mapping[str, str | int | float] | None = None,
    ) -> Appended | Duplicate | Closed:
        """Append as a producer: a user, a client or another conversation.

        Args:
            conversation_id: an existing conversation.
            events: one or more; appended together.
            key: idempotency key. Without one, a new key is made, which covers only retries within this call.
            quiet: send no notification.
            condition: condition for the append.
            seen_id: required id of the last event; None for any.
            cause: id and checksum of the action that these events report about; None for none.
            dispatch: positions in `events` of actions for a tool worker that no step waits for.
            fields: fields of the index to set in the same step.

        Raises:
            UnknownConversation: no such conversation.
            ConversationBusy: the condition is not met; nothing was written.
            ConversationMoved: the last event has another id; nothing was written.
            EventsLost: the log does not have the action `cause`; nothing was written.
        """
        writer = ProducerWriter(key or new_key(), condition, quiet, seen_id, cause=cause)
        outcome = await self._append(conversation_id, writer, events, dispatch=frozenset(dispatch), fields=fields)
        if isinstance(outcome, Conflict):
            raise ConversationMoved(conversation_id, outcome.last_id)
        if isinstance(outcome, Lost):
            assert cause is not None
            raise EventsLost(conversation_id, outcome.last_id, *cause)
        assert isinstance(outcome, Appended | Duplicate | Closed)
        return outcome

    async def append_stop(self, conversation_id: str, stopped: PartyStopped, *, capability: str = "") -> None:
        """Append the end of a stopped action, as a tool worker. Each action has at most one.

        Args:
            capability: of the action, see `ActionDelivery`.

        Raises:
            UnknownConversation: no such conversation.
        """
        writer = ProducerWriter(f"party_stopped:{stopped.action_id}", is_quiet=True, capability=capability)
        await self._append(conversation_id, writer, [stopped])

    async def append_observation(
        self,
        conversation_id: str,
        observation: Event,
        *,
        worker_id: str,
        place: str = "",
        checksum: str = "",
        fingerprint: str = "",
    ) -> Appended | Duplicate | Closed:
        """Append the observation of the action `observation.cause`, as a tool worker. An action gets exactly one.

        Args:
            place: the action's entry, `<stream>|<entry>`. It is acknowledged in the same step, whatever the outcome.
            checksum: checksum of the action that ran; empty to accept any event with its id.
            fingerprint: of the action that ran, as workspace hosts know it; see `find_action`.

        Raises:
            EventsLost: the log does not hold that action.
        """
        cause = observation.cause
        assert cause is not None
        has_used = observation.workspace_use is not WorkspaceUse.NONE
        writer = ToolWriter(worker_id, cause, place, checksum, fingerprint, has_used)
        outcome = await self._append(conversation_id, writer, [observation], answers={0: cause})
        if isinstance(outcome, Lost):
            raise EventsLost(conversation_id, outcome.last_id, cause, checksum)
        assert isinstance(outcome, Appended | Duplicate | Closed)
        return outcome

    async def append_as_owner(
        self,
        ownership: Ownership,
        events: Sequence[Event],
        *,
        expected_last_id: int,
        checksum: str = "",
        masked: MaskedEvents = NO_MASKED_EVENTS,
        dispatch: Iterable[int] = (),
        answers: Mapping[int, int] | None = None,
        cancels: Sequence[int] = (),
        fields: Mapping[str, str | int | float] | None = None,
    ) -> AppendOutcome:
        """Append the events that the owner decided from the log up to `expected_last_id`.

        Args:
            checksum: checksum of the event `expected_last_id`; empty to accept any event with that id.
            masked: masked copies of the first of `events`, see `mask`. If a secret was added since, the outcome is
                `Conflict`, because the folded events must not be written.
            dispatch: positions in `events` of actions that go to their action stream at once.
            answers: position in `events` → id of the runnable action that this observation settles.
            cancels: ids of running actions to stop; 0 stops all programs of the workspace.
            fields: fields of the conversation in a listing.

        Raises:
            EventsLost: the log ends before `expected_last_id`, or holds another event with that id.
        """
        outcome = await self._append(
            ownership.conversation_id,
            Owner(ownership, expected_last_id, checksum, new_key()),
            events,
            masked=masked,
            dispatch=frozenset(dispatch),
            answers=answers or {},
            cancels=cancels,
            fields=fields or {},
        )
        assert outcome is not None
        if isinstance(outcome, Conflict) and outcome.last_id == expected_last_id:
            await settle_results(self.store, ownership.conversation_id)
        if isinstance(outcome, Lost) or (isinstance(outcome, Conflict) and outcome.last_id < expected_last_id):
            raise EventsLost(ownership.conversation_id, outcome.last_id, expected_last_id, checksum)
        return outcome

    async def fork(self, source_id: str, target: ConversationCreated, *, at: int) -> Appended | Duplicate:
        """Create a conversation with events 2 to `at` of another one. `target` replaces event 1.

        Idempotent: the same target id and `at` give the same conversation.

        Raises:
            UsageError: `at` is not an event of the source.
        """
        events = await self.read(source_id, until=at)
        if len(events) != at:
            raise UsageError(
                f"The conversation {source_id!r} has {len(events)} events; it cannot be forked at {at}.",
                remedy=f"Choose an event from 1 to {len(events)}.",
            )
        whole = [await self.blobs.restore_event(source_id, event) for event in events[1:]]
        blobs = await self.blobs.fetch_binary(source_id, whole)
        return await self.create_from(target, whole, key=f"fork:{source_id}@{at}", blobs=blobs)

    async def create_from(
        self,
        created: ConversationCreated,
        events: Sequence[Event],
        *,
        key: str,
        shards: int | None = None,
        blobs: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Appended | Duplicate:
        """Create a conversation with the events of another log, which may come from another store.

        Idempotent: the same id and key give the same conversation.

        Args:
            events: all events from id 2 on, in order, with the full text of their fields.
            shards: see `create`.
            blobs: the binary blobs that the events refer to, by address; texts of shortened fields are not needed.

        Raises:
            UsageError: the id is invalid, or another conversation has it.
        """
        runnable = {event.id for event in events if event.runnable}
        # Actions that ran for the source must not run again here.
        answers = {n: event.cause for n, event in enumerate(events, 1) if event.cause in runnable}

        async def create(shards: int) -> Appended | Duplicate:
            creator = Creator(key, created.workspace.pool, shards=shards)
            fields = make_copied_fields(created, events)
            return await self._create([created, *events], creator, answers=answers, fields=fields, blobs=blobs)

        repeat = self.store.repeat_if_raised
        return await (repeat(created.conversation_id, create) if shards is None else create(shards))

    async def _append(
        self,
        conversation_id: str,
        writer: Writer,
        events: Sequence[Event],
        *,
        masked: MaskedEvents = NO_MASKED_EVENTS,
        dispatch: frozenset[int] = frozenset(),
        answers: Mapping[int, int] | None = None,
        cancels: Sequence[int] = (),
        fields: Mapping[str, str | int | float] | None = None,
        cipher: Cipher | None = None,
        blobs: Mapping[str, bytes] = MappingProxyType({}),
    ) -> AppendOutcome | None:
        is_new = isinstance(writer, Creator)
        names = await (self.store.place if is_new else self.store.locate)(conversation_id)
        if isinstance(writer, Creator) and writer.shards != self.store.shards:
            raise ShardsRaised  # what was stored for it may be elsewhere
        # The position of a producer's or a tool's event is assigned by the store.
        first_id = 1 if is_new else writer.seen_id + 1 if isinstance(writer, Owner) else None
        for _ in range(MAX_LOOK_UPS):
            if not is_new and (events or (fields and "last_error" in fields)):
                cipher = await self.store.encryption.find_cipher(conversation_id)
            masker, known = await self._load_checked_masker(conversation_id)
            if isinstance(writer, Owner) and masked.events and masked.masker.values != masker.values:
                if self.secrets is None or self.secrets.is_cached(conversation_id):
                    return Conflict(writer.seen_id)
                await self.secrets.look_up(conversation_id)  # the secrets that `mask` used were evicted
                continue
            entries: list[NewEntry] = []
            is_masked = True
            contents: dict[str, bytes] = dict(blobs)
            for position, event in enumerate(events):
                own_masker = NO_MASKER if masker is NO_MASKER or masked.is_masked(position, masker) else masker
                data, texts = await self._encode(event, own_masker)
                if cipher is not None:
                    data = codec.encrypt_entry(data, cipher, None if first_id is None else first_id + position)
                contents |= texts
                answered = answers.get(position) if answers else None
                route = ""
                if position in dispatch:
                    route = f"pool:{event.required_pool}" if event.required_pool else "1"
                entries.append(NewEntry(data, route, answered))
            # A repeated creation, or an append after another conversation got the id, must not exchange its texts.
            text_cipher = cipher
            if contents and (changed := await self.store.encryption.find_changed_cipher(conversation_id, cipher)):
                if not is_new:
                    continue
                text_cipher = changed.cipher
            # Blobs are written before the append, although the store may still refuse it.
            for chunk in split_into_chunks(contents):
                if (await self.load_masker(conversation_id)).values != masker.values:
                    is_masked = False
                    break
                await self.blobs.put(conversation_id, chunk, text_cipher)
            if not is_masked:
                continue
            shown = (
                {name: replace_surrogates(masker.mask_wire(value)) for name, value in fields.items()} if fields else {}
            )
            shown = encrypt_fields(cipher, shown) if cipher is not None else shown
            arguments = make_append_arguments(conversation_id, writer, entries, cancels, shown, secrets=known)
            reply = await self.store.call_function("deck_append", (names.root, names.shard.root), *arguments)
            if reply[0] == "locked" and self.store.encryption.is_on:
                self.store.encryption.forget_cipher(conversation_id)
                continue
            if reply[0] == "missing" and await self.store.has_moved(names):
                self.store.encryption.forget_cipher(conversation_id)
                names = await self.store.locate(conversation_id)
                continue
            if reply[0] != "secrets":
                raise_refusal(reply)
                if is_new and reply[0] == "appended":
                    self.store.encryption.remember(conversation_id, cipher)
                return parse_outcome(reply, conversation_id, codec.checksum_of(entries[-1].data if entries else b""))
            assert self.secrets is not None
            await self.secrets.look_up(conversation_id)
        raise StoreError(f"The secrets or the key of {conversation_id} change faster than they can be read.")

    async def _encode(self, event: Event, masker: Masker) -> tuple[bytes, dict[str, bytes]]:
        """Return the bytes of an event, and its long texts by their blob addresses."""
        wire = event.wire()
        if masker:
            # Masking a megabyte takes 0.1 s. A thread keeps other conversations running.
            wire = await asyncio.to_thread(masker.mask_wire, wire)
        if event.timestamp is None:
            wire["timestamp"] = self.store.clock.now().isoformat()
        return codec.to_entry(wire)
