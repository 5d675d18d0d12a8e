"""The inbox: tasks of producers that speak no Celery, as entries of one stream; docs/producing-work.md is the contract.

Holds: an entry is acknowledged after its conversation has begun and its producer has been answered, so one that the
store accepted is carried out, whatever dies; the same id of the same producer begins one conversation. What cannot be
used is answered, if it says where, and put aside without its secrets; so is whatever a door fails at. No entry waits
for another one.
Keys: `deck:inbox`, group `doors`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

from pydantic import Field

from broker.celery.messages import MAX_DEPTH, is_deeper
from broker.coordination.unreadable import Unreadable
from broker.runtime.errors import (
    AdmissionRefused,
    DeckhandsError,
    StoreRefused,
    UsageError,
)
from broker.runtime.failpoints import failpoint
from broker.secrets.masking import MASK
from broker.store.connection import Argument
from broker.store.group_reader import GroupReader
from broker.store.keys import INBOX
from deckhands.door.callers import STREAM, Caller
from deckhands.door.desk import STORE_FAILS, Desk
from deckhands.door.outcome_watcher import answer_stream
from deckhands.door.replies import NAME, VERSION, Replies
from deckhands.tasks.requests import MAX_KEY_CHARS, TaskRequest
from deckhands.tasks.tasks import conversation_id_of

GROUP = "doors"
AT_ONCE = 32
READ_AT_ONCE = 8
"""Few: their size is known when they are in memory."""
FORSAKEN_AT_ONCE = 32
MOST_DELIVERIES = 3
"""How often an entry may be handed out and not be read, because it ends the door that receives it."""
MAX_ENTRY_BYTES = 1 << 20
UPKEEP_SECONDS = 1.0
FORSAKEN_AFTER_SECONDS = 10.0
"""Longer than an entry may wait for anything but the store, see `desk.OFFERS_LIMIT_SECONDS`."""
FIELDS = frozenset({b"v", b"request", b"reply_to"})

_log = logging.getLogger(__name__)


class _Failed(DeckhandsError):
    """An entry at which the door itself failed."""

    code = "internal"


class InboxRequest(TaskRequest):
    """What an entry asks for: a task, and the producer's own id.

    Attributes:
        id: the same id of the same producer always means the same conversation; null: the id of the entry.
    """

    id: Annotated[str, Field(min_length=1, max_length=MAX_KEY_CHARS)] | None = None


class Inbox:
    """The inbox of a store, as one door reads it."""

    def __init__(self, desk: Desk, worker_id: str) -> None:
        self._desk, self._worker_id = desk, worker_id
        self._store = desk.store
        self._replies = Replies(desk.store)
        self._unreadable = Unreadable(desk.store)
        self._free = asyncio.Semaphore(AT_ONCE)
        self._under_way: set[str] = set()
        self.entries = 0

    async def read(self) -> None:
        """Take entries, for ever."""
        with suppress(StoreRefused):  # the upkeep tries again
            await self._make_group()
        reader = GroupReader(self._store, GROUP, self._worker_id, [INBOX])
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    async with self._free:
                        found = await reader.read(limit=READ_AT_ONCE)
                    if found:
                        await self._say_read([entry for _, entry, _ in found])
                    for _, entry, fields in found:
                        await self._start(group, entry.decode(), fields)
        finally:
            await reader.aclose()

    async def keep_up(self) -> None:
        """Take over the entries of doors that have died, for ever."""
        after = "-"
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(UPKEEP_SECONDS)
                try:
                    await self._make_group()
                    after = await self._take_over(group, after)
                except Exception:  # noqa: BLE001  (the outer edge: the next look begins at the first entry)
                    after = "-"
                    _log.exception("the inbox cannot be kept up")

    async def _take_over(self, group: asyncio.TaskGroup, after: str) -> str:
        """Take over some entries behind one, and return where to look next: `-` after the last."""
        idle_ms = int(FORSAKEN_AFTER_SECONDS * 1000)
        found = await self._store.call("XPENDING", INBOX, GROUP, "IDLE", idle_ms, after, "+", FORSAKEN_AT_ONCE)
        for raw, _, _, deliveries in found:
            entry = raw.decode()
            if entry in self._under_way:
                continue
            if deliveries >= MOST_DELIVERIES:
                error = UsageError(f"The entry was delivered {deliveries} times, and no door could read it.")
                await self._unreadable.put_aside(self._store.all_shards[0], INBOX, entry, (), error)
                await self._done(entry)
                continue
            # One by one: if one ends this door, those before it are under way and the others are not to blame.
            claimed = await self._store.call("XCLAIM", INBOX, GROUP, self._worker_id, idle_ms, entry)
            if claimed and claimed[0] and claimed[0][1]:
                await self._say_read([raw])
                await self._start(group, entry, claimed[0][1])
        return f"({found[-1][0].decode()}" if len(found) == FORSAKEN_AT_ONCE else "-"

    async def _say_read(self, entries: Sequence[bytes]) -> None:
        """Count the deliveries of entries that have been read from 0 again: whatever ends this door now, not they."""
        with suppress(StoreRefused):  # the stream was overwritten or removed meanwhile
            await self._store.call("XCLAIM", INBOX, GROUP, self._worker_id, 0, *entries, "RETRYCOUNT", 0, "JUSTID")

    async def _start(self, group: asyncio.TaskGroup, entry: str, fields: list[bytes]) -> None:
        """Take an entry in a task, once there is room."""
        if entry in self._under_way:
            return
        self._under_way.add(entry)
        await self._free.acquire()
        group.create_task(self._take(entry, fields)).add_done_callback(lambda _: self._ended(entry))

    def _ended(self, entry: str) -> None:
        self._under_way.discard(entry)
        self._free.release()

    async def _take(self, entry: str, fields: list[bytes]) -> None:
        """Begin what one entry asks for, or put it aside."""
        self.entries += 1
        about = dict(zip(fields[::2], fields[1::2], strict=False))
        name = about.get(b"reply_to", b"").decode(errors="replace")
        reply_to = name if NAME.fullmatch(name) else ""
        request_id = entry
        try:
            try:
                request_id = _id_in(about) or entry
                await self._carry_out(entry, fields, request_id, reply_to)
            except (UsageError, AdmissionRefused) as error:
                await self._reject(entry, fields, request_id, reply_to, error)
        except STORE_FAILS:
            _log.exception("entry %s of the inbox cannot be taken now; it is tried again", entry)
        except Exception as error:  # noqa: BLE001  (the outer edge: whatever is wrong with it)
            _log.exception("entry %s of the inbox cannot be taken", entry)
            await self._give_up(entry, fields, request_id, reply_to, error)

    async def _give_up(self, entry: str, fields: list[bytes], request_id: str, reply_to: str, error: Exception) -> None:
        """Put an entry aside that nobody foresaw, and answer it if that is possible."""
        failed = _Failed(f"The door failed at this entry: {type(error).__name__}.", remedy="Its log says more.")
        for answers_to in dict.fromkeys((reply_to, "")):
            try:
                await self._reject(entry, fields, request_id, answers_to, failed)
                break
            except Exception:  # noqa: BLE001  (the outer edge: without an answer, then)
                _log.exception("entry %s of the inbox cannot be put aside", entry)

    async def _carry_out(self, entry: str, fields: list[bytes], request_id: str, reply_to: str) -> None:
        caller = await self._begin(parsed(fields), request_id, reply_to, entry)
        conversation_id = caller.conversation_id
        failpoint("door.inbox_begun")
        if reply_to:
            content = {"conversation_id": conversation_id}
            await self._replies.send(reply_to, request_id, "accepted", conversation_id=conversation_id, content=content)
            kept = await self._desk.callers.of(conversation_id)
            if kept is None:
                await self._desk.callers.keep(caller)
            elif kept.is_answered:  # the producer asks again
                await answer_stream(self._desk, self._replies, kept)
        failpoint("door.inbox_answered")
        await self._done(entry)

    async def _begin(self, request: InboxRequest, request_id: str, reply_to: str, entry: str) -> Caller:
        conversation_id = conversation_id_of(f"inbox:{reply_to}:{request_id}")
        caller = Caller(conversation_id, STREAM, reply_to, request_id, is_headless=request.headless)
        if reply_to:
            await self._desk.callers.keep(caller)
        task = TaskRequest.model_validate(request.model_dump(exclude={"id"}))
        timing = task.timing()
        if timing.delay_seconds is not None or isinstance(timing.expires, float):
            timing = timing.after(await self._age_seconds(entry))
        awaited = caller.awaited if reply_to else ""
        await self._desk.begin(task, conversation_id, request_id, awaited=awaited, timing=timing)
        return caller

    async def _age_seconds(self, entry: str) -> float:
        """Return how long an entry has been in the stream, by the clock of the server, which has named it."""
        seconds, microseconds = await self._store.call("TIME")
        added_ms = int(entry.partition("-")[0])
        return max(0.0, int(seconds) + int(microseconds) / 1_000_000 - added_ms / 1_000)

    async def _reject(
        self, entry: str, fields: list[bytes], request_id: str, reply_to: str, error: DeckhandsError
    ) -> None:
        conversation_id = conversation_id_of(f"inbox:{reply_to}:{request_id}")
        has_begun = bool(reply_to and await self._desk.meta(conversation_id))
        if reply_to and not has_begun:
            await self._desk.callers.forget(conversation_id)
        if reply_to and not (has_begun and isinstance(error, _Failed)):  # else its conversation answers
            reason: dict[str, str | float] = {"code": error.code, "message": error.message, "remedy": error.remedy}
            if isinstance(error, AdmissionRefused):
                reason["retry_after_seconds"] = error.retry_after_seconds
            await self._replies.send(reply_to, request_id, "rejected", content=reason)
        if not (reply_to and isinstance(error, AdmissionRefused)):  # a producer that knows sends it again
            await self._unreadable.put_aside(self._store.all_shards[0], INBOX, entry, without_secrets(fields), error)
        await self._done(entry)

    async def _done(self, entry: str) -> None:
        commands: list[tuple[Argument, ...]] = [("XACK", INBOX, GROUP, entry), ("XDEL", INBOX, entry)]
        with suppress(StoreRefused):  # the inbox has been overwritten, and the entry went with it
            await self._store.call_many(commands)

    async def _make_group(self) -> None:
        """Make the group if it is not there; a key of another type is moved out of the way."""
        make = ("XGROUP", "CREATE", INBOX, GROUP, "0", "MKSTREAM")
        try:
            await self._store.call(*make)
        except StoreRefused as error:
            if "BUSYGROUP" in error.message:
                return
            if "WRONGTYPE" not in error.message:
                raise
            await self._unreadable.move_away(INBOX, "stream", error)
            await self._store.call(*make)


def parsed(fields: Sequence[bytes]) -> InboxRequest:
    """Return what the fields of an entry ask for.

    Raises:
        UsageError: they cannot be used; says why.
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
        raise UsageError("The field idempotency_key is of no use here.", remedy="Use the field id.")
    return InboxRequest.parse(found)


def _id_in(about: Mapping[bytes, bytes]) -> str:
    """Return the producer's own id, if it can be read out of an entry that may be unusable."""
    try:
        found: Any = json.loads(about.get(b"request", b"").decode())
    except (ValueError, RecursionError):
        return ""
    name = found.get("id") if isinstance(found, dict) else None
    return name if isinstance(name, str) and 0 < len(name) <= MAX_KEY_CHARS and _is_text(name) else ""


def without_secrets(fields: Sequence[bytes]) -> list[bytes]:
    """Return the fields of an entry as they may be kept: what cannot be read and may have secrets is left out."""
    return [_without_secrets(part) for part in fields]


def _without_secrets(part: bytes) -> bytes:
    if b"secret" not in part.lower() and b"\\u" not in part:
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
        return {name: MASK if name == "secrets" else _hidden(value) for name, value in found.items()}
    return [_hidden(value) for value in found] if isinstance(found, list) else found


def _is_text(found: Any) -> bool:
    """Say whether JSON that was parsed can be written as UTF-8 again."""
    try:
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True
