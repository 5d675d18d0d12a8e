"""The inbox: tasks of producers without Celery, as entries of streams; docs/producing-work.md is the contract.

Each producer may have its own stream, with a store user that alone may add to it; `deck:inbox` is for a single trusted
producer. Entries are not signed, so any writer of a stream chooses their fields. In its own stream, a producer is
authenticated: its tenant is the one that the operator bound it to, its answers are sent to its own reply stream, and
its ids are scoped to it. In the shared stream, an entry may name any tenant, and any reply stream except those of
producers with their own stream.

Holds: an entry is acknowledged after its conversation was created and its producer was answered, so every entry that
the store accepted is performed in spite of crashes; the same id of the same producer creates one conversation. An
invalid entry is answered, if it names a reply stream, and quarantined without its secrets. The same happens to an entry
at which a worker fails. Entries do not wait for each other, nor do producers: each stream has its own reader and its
own slots.
Does not: keep an entry that its producer trims away before it is read.
Keys: `deck:inbox`, `deck:inbox:<name>`, `…:moved`, `…:moved:<id>`, group `ingresses`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from broker.celery import MAX_DEPTH, is_deeper
from broker.coordination import (
    GROUP,
    PARSE_ERRORS,
    Producer,
    Producers,
    Quarantine,
    list_moved_streams,
    make_moved_key,
    make_moved_prefix,
    parse_moved_ms,
)
from broker.runtime import (
    AdmissionRefused,
    DeckhandsError,
    StoreRefused,
    UsageError,
    failpoint,
    new_token,
    to_millis,
    wait_for_tick,
)
from broker.secrets import MASK
from broker.store import INBOX, Argument, GroupReader
from deckhands.client import MAX_KEY_CHARS, TaskSpec, derive_conversation_id
from deckhands.ingress.callers import STREAM, Caller
from deckhands.ingress.context import STORE_ERRORS, IngressContext, is_temporary
from deckhands.ingress.outcome_watcher import send_outcome
from deckhands.ingress.replies import NAME, VERSION, Replies

MAX_IN_FLIGHT = 64
READ_AT_ONCE = 8
"""Few, because their size is known only when they are in memory. After small ones, more are read: as many as have
`READ_BYTES` if each is as large as the largest of the last ones."""
READ_BYTES = 1 << 18
PRODUCER_MAX_IN_FLIGHT = 8
PRODUCER_READ_AT_ONCE = 2
"""The same for a producer's own stream: there may be `MAX_PRODUCERS` of them."""
LAST_ID = f"{2**64 - 1}-{2**64 - 1}"
"""The store adds nothing more to a stream with this last id."""
MAX_MOVED = 4
"""How many moved streams of one producer may wait to be read."""
MOVED_SECONDS = 60.0
"""After this time, a moved stream that does not exist was read to its end."""
FORSAKEN_AT_ONCE = 32
MAX_DELIVERIES = 3
"""How often an entry may be delivered without being read, because it crashes the worker that receives it."""
MAX_ENTRY_BYTES = 1 << 20
MAINTENANCE_SECONDS = 1.0
FORSAKEN_AFTER_SECONDS = 10.0
"""Longer than an entry may wait for anything but the store, see `context.OFFERS_LIMIT_SECONDS`."""
FIELDS = frozenset({b"v", b"request", b"reply_to"})
SECRET = b"secret"
"""A field whose name contains this is not kept, in any case and encoding."""

_log = logging.getLogger(__name__)


class _Failed(DeckhandsError):
    """The ingress worker itself failed at an entry."""

    code = "internal"


class InboxRequest(TaskSpec):
    """The request of an entry: a task, and the producer's own id.

    Attributes:
        id: the same id of the same producer always means the same conversation; null: the id of the entry.
    """

    id: Annotated[str, Field(min_length=1, max_length=MAX_KEY_CHARS)] | None = None


@dataclass(frozen=True, slots=True)
class InboxSource:
    """A stream of entries.

    Attributes:
        producer: its only writer; None for the shared stream.
        is_moved: it had no entry ids left and was moved. No entry is added to it, and it is removed once it is empty.
    """

    key: str = INBOX
    producer: Producer | None = None
    is_moved: bool = False


SHARED = InboxSource()


class InboxReaders:
    """All inbox streams of a store, as one worker reads them."""

    def __init__(self, context: IngressContext, worker_id: str) -> None:
        self._context = context
        self._worker_id = worker_id
        self._producers = Producers(context.store)
        self._known: dict[str, Producer] = {}
        self._entries = 0
        self._read: dict[InboxSource, tuple[InboxReader, list[asyncio.Task[None]]]] = {}

    @property
    def entries(self) -> int:
        """How many entries this worker has received."""
        return self._entries + sum(inbox.entries for inbox, _ in self._read.values())

    async def run(self) -> None:
        """Read every stream, forever. The stream of a new producer is found within about a second."""
        async with asyncio.TaskGroup() as group:
            while True:
                wanted = {SHARED}
                try:
                    wanted = await self._sources()
                except (StoreRefused, *PARSE_ERRORS):
                    _log.exception("cannot read the producers")
                    wanted |= self._read.keys()
                for source in self._read.keys() - wanted:
                    inbox, tasks = self._read.pop(source)
                    self._entries += inbox.entries
                    for task in tasks:
                        task.cancel()
                for source in wanted - self._read.keys():
                    inbox = InboxReader(self._context, self._worker_id, source, known=self._known)
                    tasks = [group.create_task(inbox.read()), group.create_task(inbox.run_maintenance())]
                    self._read[source] = (inbox, tasks)
                await wait_for_tick(MAINTENANCE_SECONDS)

    async def _sources(self) -> set[InboxSource]:
        found = await self._producers.load_all()
        self._known.clear()
        self._known.update(found)
        sources = [SHARED, *(InboxSource(producer.stream, producer) for producer in found.values())]
        moved_away = [
            replace(source, key=key, is_moved=True)
            for source in sources
            for key in await list_moved_streams(self._context.store, source.key)
        ]
        return {*sources, *moved_away}


class InboxReader:
    """One inbox stream, as one worker reads it.

    Args:
        known: returns the current producers with their own stream.
    """

    def __init__(
        self,
        context: IngressContext,
        worker_id: str,
        source: InboxSource = SHARED,
        *,
        known: Mapping[str, Producer] | None = None,
    ) -> None:
        self._context = context
        self._worker_id = worker_id
        self._source = source
        self._key = source.key
        self._known = known if known is not None else {}
        self._store = context.store
        self._producers = Producers(context.store)
        self._replies = Replies(context.store)
        self._unreadable = Quarantine(context.store)
        self._max_in_flight = MAX_IN_FLIGHT if source.producer is None else PRODUCER_MAX_IN_FLIGHT
        self._read_at_least = READ_AT_ONCE if source.producer is None else PRODUCER_READ_AT_ONCE
        self._free = asyncio.Semaphore(self._max_in_flight)
        self._in_flight: set[str] = set()
        self._done: list[str] = []
        self._acknowledging: asyncio.Task[None] | None = None
        self.entries = 0

    async def read(self) -> None:
        """Receive entries, forever."""
        with suppress(StoreRefused):  # maintenance tries again
            await self._make_group()
        reader = GroupReader(self._store, GROUP, self._worker_id, [self._key])
        try:
            async with asyncio.TaskGroup() as group:
                limit = self._read_at_least
                while True:
                    async with self._free:
                        found = await reader.read(limit=limit)
                    if found:
                        await self._reset_deliveries([entry for _, entry, _ in found])
                        largest = max(sum(map(len, fields)) for _, _, fields in found)
                        limit = max(self._read_at_least, min(READ_BYTES // max(largest, 1), self._max_in_flight))
                    for _, entry, fields in found:
                        await self._start(group, entry.decode(), fields)
        finally:
            await reader.aclose()

    async def run_maintenance(self) -> None:
        """Claim the entries of dead workers, forever."""
        after = "-"
        async with asyncio.TaskGroup() as group:
            while True:
                await wait_for_tick(MAINTENANCE_SECONDS)
                try:
                    if self._source.is_moved:
                        if await self._remove_if_empty():
                            continue
                    else:
                        await self._make_group()
                        await self._recover_ids()
                    after = await self._claim_forsaken(group, after)
                except Exception:  # noqa: BLE001  (the outer edge: the next look begins at the first entry)
                    after = "-"
                    _log.exception("cannot maintain the inbox %s", self._key)

    async def _recover_ids(self) -> None:
        """Rename a stream that has used up its entry ids; it is read to its end under the new name.

        The new name is unique, so this does not conflict with another worker that also moves or removes the stream.
        """
        flat = await self._store.call("XINFO", "STREAM", self._key)
        about = dict(zip(flat[::2], flat[1::2], strict=False))
        if about.get(b"last-generated-id") != LAST_ID.encode():
            return
        registry = make_moved_key(self._key)
        if await self._store.call("HLEN", registry) >= MAX_MOVED:
            return
        place = f"{make_moved_prefix(self._key)}{new_token()}"
        name_it = ("HSET", registry, place, to_millis(self._store.clock.now()))
        await self._store.call(*name_it)
        with suppress(StoreRefused):  # another worker was faster
            await self._store.call_many([("RENAMENX", self._key, place), name_it])
        await self._make_group()
        _log.error(
            "an entry of %s had the highest id, after which the store adds no other; its %d entries are read from %s",
            self._key,
            about.get(b"length", 0),
            place,
        )

    async def _remove_if_empty(self) -> bool:
        """Remove a moved stream once all its entries are done, and return whether it is gone."""
        registry = make_moved_key(self._key[1:].partition("}")[0])
        length, named_ms = await self._store.call_many([("XLEN", self._key), ("HGET", registry, self._key)])
        if length:
            return False
        if await self._store.call("DEL", self._key):
            await self._store.call("HDEL", registry, self._key)
        elif named_ms and to_millis(self._store.clock.now()) - parse_moved_ms(named_ms) > MOVED_SECONDS * 1000:
            await self._store.call(
                "HDEL", registry, self._key
            )  # the worker that named it has died, or another has removed it
        return True

    async def _claim_forsaken(self, group: asyncio.TaskGroup, after: str) -> str:
        """Claim some entries after one, and return where to continue; `-` after the last."""
        idle_ms = int(FORSAKEN_AFTER_SECONDS * 1000)
        found = await self._store.call("XPENDING", self._key, GROUP, "IDLE", idle_ms, after, "+", FORSAKEN_AT_ONCE)
        for raw, _, _, deliveries in found:
            entry = raw.decode()
            if entry in self._in_flight:
                continue
            if deliveries >= MAX_DELIVERIES:
                error = UsageError(f"The entry was delivered {deliveries} times, and no ingress worker could read it.")
                await self._unreadable.quarantine(self._store.all_shards[0], self._key, entry, (), error)
                await self._acknowledge(entry)
                continue
            # One by one: if one crashes this worker, those before it are already in flight, and later ones are not
            # blamed.
            claimed = await self._store.call("XCLAIM", self._key, GROUP, self._worker_id, idle_ms, entry)
            if claimed and claimed[0] and claimed[0][1]:
                await self._reset_deliveries([raw])
                await self._start(group, entry, claimed[0][1])
        return f"({found[-1][0].decode()}" if len(found) == FORSAKEN_AT_ONCE else "-"

    async def _reset_deliveries(self, entries: Sequence[bytes]) -> None:
        """Reset the delivery count of entries that were read: if this worker crashes now, they are not to blame."""
        with suppress(StoreRefused):  # the stream was overwritten or removed meanwhile
            await self._store.call("XCLAIM", self._key, GROUP, self._worker_id, 0, *entries, "RETRYCOUNT", 0, "JUSTID")

    async def _start(self, group: asyncio.TaskGroup, entry: str, fields: list[bytes]) -> None:
        """Process an entry in a task, once a slot is free."""
        if entry in self._in_flight:
            return
        self._in_flight.add(entry)
        await self._free.acquire()
        group.create_task(self._take(entry, fields)).add_done_callback(lambda _: self._release_slot(entry))

    def _release_slot(self, entry: str) -> None:
        self._in_flight.discard(entry)
        self._free.release()

    async def _take(self, entry: str, fields: list[bytes]) -> None:
        """Create the conversation of an entry, or quarantine the entry."""
        producer = self._source.producer
        try:
            if producer is not None and not await self._producers.is_current(producer):
                return  # it was removed, and the reader of its successor takes the entry over
        except STORE_ERRORS:
            _log.exception("cannot process entry %s of the inbox now; retrying", entry)
            return
        self.entries += 1
        about = dict(zip(fields[::2], fields[1::2], strict=False))
        name = about.get(b"reply_to", b"").decode(errors="replace")
        reply_to = self._reply_stream(name)
        request_id = entry
        try:
            try:
                request_id = _id_in(about) or entry
                await self._accept(entry, fields, request_id, reply_to)
            except (UsageError, AdmissionRefused) as error:
                await self._reject(entry, fields, request_id, reply_to, error)
        except Exception as error:  # noqa: BLE001  (the outer edge: whatever is wrong with it)
            if is_temporary(error):
                _log.exception("cannot process entry %s of the inbox now; retrying", entry)
                return
            _log.exception("cannot process entry %s of the inbox", entry)
            await self._quarantine(entry, fields, request_id, reply_to, error)

    def _reply_stream(self, name: str) -> str:
        """Return the permitted reply stream of an entry, even of an invalid entry; empty for none."""
        if self._source.producer is not None:
            return self._source.producer.name if name else ""
        return name if NAME.fullmatch(name) and name not in self._known else ""

    def _check_source(self, fields: Sequence[bytes], request: InboxRequest) -> InboxRequest:
        """Return a request with the tenant of its producer.

        Raises:
            UsageError: the request names the tenant or the reply stream of another producer.
        """
        name = dict(zip(fields[::2], fields[1::2], strict=False)).get(b"reply_to", b"").decode()
        producer = self._source.producer
        if name and (producer.name != name if producer is not None else name in self._known):
            own = (
                f"Use {producer.name}." if producer is not None else "Use another name, or the stream of that producer."
            )
            raise UsageError(f"The reply stream {name} belongs to another producer.", remedy=own)
        return (
            request if producer is None else request.model_copy(update={"tenant": producer.bind_tenant(request.tenant)})
        )

    def _conversation_id(self, reply_to: str, request_id: str) -> str:
        producer = self._source.producer
        return derive_conversation_id(
            f"inbox:{reply_to}:{request_id}" if producer is None else f"producer:{producer.unique_name}:{request_id}"
        )

    async def _quarantine(
        self, entry: str, fields: list[bytes], request_id: str, reply_to: str, error: Exception
    ) -> None:
        """Quarantine an entry after an unexpected error, and answer it if possible."""
        failed = _Failed(
            f"The ingress worker failed at this entry: {type(error).__name__}.", remedy="Its log says more."
        )
        for answers_to in dict.fromkeys((reply_to, "")):
            try:
                await self._reject(entry, fields, request_id, answers_to, failed)
                break
            except Exception:  # noqa: BLE001  (the outer edge: without an answer, then)
                _log.exception("cannot quarantine entry %s of the inbox", entry)

    async def _accept(self, entry: str, fields: list[bytes], request_id: str, reply_to: str) -> None:
        request = self._check_source(fields, parse_entry(fields))
        conversation_id = self._conversation_id(reply_to, request_id)
        caller = Caller(conversation_id, STREAM, reply_to, request_id, is_headless=request.headless)
        timing = request.timing()
        if timing.delay_seconds is not None or isinstance(timing.expires, float):
            timing = timing.after(await self._age_seconds(entry))
        is_new = await self._context.start_conversation(
            request.with_timing(timing), conversation_id, request_id, caller=caller if reply_to else None
        )
        failpoint("ingress.inbox_begun")
        if reply_to:
            content = {"conversation_id": conversation_id}
            await self._replies.send(reply_to, request_id, "accepted", conversation_id=conversation_id, content=content)
            if not is_new:
                await self._answer_again(caller)
        failpoint("ingress.inbox_answered")
        await self._acknowledge(entry)

    async def _answer_again(self, caller: Caller) -> None:
        """Repeat the answer, if there is one already, to a producer that has sent an entry again."""
        kept, meta, _ = await self._context.load(caller.conversation_id)
        if kept is None:
            await self._context.callers.add(caller)
        elif kept.is_answered:
            await send_outcome(self._context, self._replies, kept, kept.outcome, meta)

    async def _age_seconds(self, entry: str) -> float:
        """Return the age of an entry by the clock of the server, from its id."""
        seconds, microseconds = await self._store.call("TIME")
        added_ms = int(entry.partition("-")[0])
        return max(0.0, int(seconds) + int(microseconds) / 1_000_000 - added_ms / 1_000)

    async def _reject(
        self, entry: str, fields: list[bytes], request_id: str, reply_to: str, error: DeckhandsError
    ) -> None:
        conversation_id = self._conversation_id(reply_to, request_id)
        has_begun = bool(reply_to and await self._context.meta(conversation_id))
        if reply_to and not has_begun:
            await self._context.callers.forget(conversation_id)
        if reply_to and not (has_begun and isinstance(error, _Failed)):  # otherwise its conversation answers
            reason: dict[str, str | float] = {"code": error.code, "message": error.message, "remedy": error.remedy}
            if isinstance(error, AdmissionRefused):
                reason["retry_after_seconds"] = error.retry_after_seconds
            await self._replies.send(reply_to, request_id, "rejected", content=reason)
        if not (reply_to and isinstance(error, AdmissionRefused)):  # the producer learns that it must send it again
            await self._unreadable.quarantine(
                self._store.all_shards[0], self._key, entry, without_secrets(fields), error
            )
        await self._acknowledge(entry)

    async def _acknowledge(self, entry: str) -> None:
        """Acknowledge an entry, together with others that finish in the same turn of the loop."""
        self._done.append(entry)
        if len(self._done) == 1:
            self._acknowledging = asyncio.create_task(self._acknowledge_done())
        assert self._acknowledging is not None
        await self._acknowledging

    async def _acknowledge_done(self) -> None:
        done, self._done = self._done, []
        commands: list[tuple[Argument, ...]] = [("XACK", self._key, GROUP, *done), ("XDEL", self._key, *done)]
        with suppress(StoreRefused):  # the inbox was overwritten, and the entries with it
            await self._store.call_many(commands)

    async def _make_group(self) -> None:
        """Create the group if it does not exist; a key of another type is renamed."""
        make = ("XGROUP", "CREATE", self._key, GROUP, "0", "MKSTREAM")
        try:
            await self._store.call(*make)
        except StoreRefused as error:
            if "BUSYGROUP" in error.message:
                return
            if "WRONGTYPE" not in error.message:
                raise
            await self._unreadable.move_away(self._key, "stream", error)
            await self._store.call(*make)


def parse_entry(fields: Sequence[bytes]) -> InboxRequest:
    """Parse the fields of an entry.

    Raises:
        UsageError: the fields are invalid; the text says why.
    """
    if sum(map(len, fields)) > MAX_ENTRY_BYTES:
        raise UsageError(
            f"The entry is larger than {MAX_ENTRY_BYTES:,} bytes.",
            remedy="Put the long part into a file of the workspace, and name the file.",
        )
    about = dict(zip(fields[::2], fields[1::2], strict=False))
    if unknown := sorted(about.keys() - FIELDS):
        raise UsageError(
            f"The entry has a field {ascii(unknown[0].decode(errors='replace'))[:100]}, which is not known.",
            remedy="It has the fields v, request and reply_to.",
        )
    if about.get(b"v") != VERSION.encode():
        raise UsageError(f"The entry is not of version {VERSION}.", remedy=f"Set the field v to {VERSION}.")
    if not NAME.fullmatch(about.get(b"reply_to", b"none").decode(errors="replace")):
        raise UsageError("The field reply_to cannot be used.", remedy="Use 1 to 64 letters, digits, '_', '.' or '-'.")
    try:
        found = json.loads(about.get(b"request", b"").decode())
    except (ValueError, RecursionError):
        raise UsageError("The field request is not JSON.", remedy="Send one JSON object in UTF-8.") from None
    if is_deeper(found, MAX_DEPTH):
        raise UsageError(f"The field request is nested more than {MAX_DEPTH} levels deep.")
    if not _is_text(found):
        raise UsageError(
            "The field request holds half of a surrogate pair, or a number that is none.",
            remedy="Send texts that can be written in UTF-8, and no NaN or Infinity.",
        )
    if isinstance(found, Mapping) and found.get("idempotency_key") is not None:
        raise UsageError("The field idempotency_key is not allowed here.", remedy="Use the field id.")
    return InboxRequest.parse(found)


def _id_in(about: Mapping[bytes, bytes]) -> str:
    """Return the producer's own id if it is readable, even of an invalid entry."""
    try:
        found: Any = json.loads(about.get(b"request", b"").decode())
    except (ValueError, RecursionError):
        return ""
    name = found.get("id") if isinstance(found, dict) else None
    return name if isinstance(name, str) and 0 < len(name) <= MAX_KEY_CHARS and _is_text(name) else ""


def without_secrets(fields: Sequence[bytes]) -> list[bytes]:
    """Return the fields of an entry without possible secrets: unreadable fields are also left out."""
    names = [b"", *fields]
    return [
        MASK.encode() if place % 2 and SECRET in names[place].lower() else _without_secrets(part)
        for place, part in enumerate(fields)
    ]


def _without_secrets(part: bytes) -> bytes:
    if SECRET not in part.lower() and b"\\u" not in part:
        return part
    if len(part) > MAX_ENTRY_BYTES:
        return MASK.encode()
    try:
        found = json.loads(part.decode())
    except (ValueError, RecursionError):
        return MASK.encode()
    return MASK.encode() if is_deeper(found, MAX_DEPTH) else json.dumps(_hidden(found)).encode()


def _hidden(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: MASK if SECRET.decode() in name.lower() else _hidden(value) for name, value in found.items()}
    return [_hidden(value) for value in found] if isinstance(found, list) else found


def _is_text(found: Any) -> bool:
    """Return whether parsed JSON can be encoded as UTF-8 again."""
    try:
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True
