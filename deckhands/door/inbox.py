"""The inbox: tasks of producers that speak no Celery, as entries of one stream; docs/producing-work.md is the contract.

Holds: an entry is acknowledged after its conversation has begun and its producer has been answered, so one that the
store accepted is carried out, whatever dies; the same id of the same producer begins one conversation. What cannot be
used is answered, if it says where, and put aside.
Keys: `deck:inbox`, group `doors`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from broker.celery.messages import MAX_DEPTH, is_deeper
from broker.coordination.unreadable import Unreadable
from broker.runtime.errors import DeckhandsError, StoreRefused, UsageError
from broker.runtime.failpoints import failpoint
from broker.store.connection import Argument
from broker.store.group_reader import GroupReader
from broker.store.keys import INBOX
from deckhands.client.requests import MAX_KEY_CHARS, TaskRequest
from deckhands.client.tasks import conversation_id_of
from deckhands.door.callers import STREAM, Caller
from deckhands.door.desk import Desk
from deckhands.door.lookout import answer_stream
from deckhands.door.replies import NAME, VERSION, Replies

GROUP = "doors"
BATCH = 32
MAX_ENTRY_BYTES = 1 << 20
UPKEEP_SECONDS = 1.0
FORSAKEN_AFTER_SECONDS = 10.0
FIELDS = frozenset({b"v", b"request", b"reply_to"})

_log = logging.getLogger(__name__)


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
        self.entries = 0

    async def read(self) -> None:
        """Take entries, for ever."""
        await self._make_group()
        reader = GroupReader(self._store, GROUP, self._worker_id, [INBOX])
        try:
            while True:
                found = await reader.read(limit=BATCH)
                await self._take_all([(entry, fields) for _, entry, fields in found])
        finally:
            await reader.aclose()

    async def keep_up(self) -> None:
        """Take over the entries of doors that have died, for ever."""
        idle_ms = int(FORSAKEN_AFTER_SECONDS * 1000)
        claim = ("XAUTOCLAIM", INBOX, GROUP, self._worker_id, idle_ms, "0-0", "COUNT", BATCH)
        while True:
            await asyncio.sleep(UPKEEP_SECONDS)
            try:
                await self._make_group()
                _, entries, *_ = await self._store.persist(lambda: self._store.connection.call(*claim))
                await self._take_all([(entry, fields) for entry, fields in entries if fields])
            except DeckhandsError:
                _log.exception("the inbox cannot be kept up")

    async def _take_all(self, entries: Sequence[tuple[bytes, list[bytes]]]) -> None:
        await asyncio.gather(*(self._take(entry.decode(), fields) for entry, fields in entries))

    async def _take(self, entry: str, fields: list[bytes]) -> None:
        """Begin what one entry asks for, or put it aside."""
        self.entries += 1
        about = dict(zip(fields[::2], fields[1::2], strict=False))
        name = about.get(b"reply_to", b"").decode(errors="replace")
        reply_to = name if NAME.fullmatch(name) else ""
        request_id = _id_in(about) or entry
        try:
            request = parsed(fields)
            conversation_id = await self._begin(request, request_id, reply_to)
        except UsageError as error:
            await self._reject(entry, fields, request_id, reply_to, error)
            return
        except DeckhandsError:
            _log.exception("entry %s of the inbox cannot be taken now; it is tried again", entry)
            return
        failpoint("door.inbox_begun")
        if reply_to:
            content = {"conversation_id": conversation_id}
            await self._replies.send(reply_to, request_id, "accepted", conversation_id=conversation_id, content=content)
            caller = await self._desk.callers.of(conversation_id)
            if caller is not None and caller.is_answered:  # the producer asks again
                await answer_stream(self._desk, self._replies, caller)
        failpoint("door.inbox_answered")
        await self._done(entry)

    async def _begin(self, request: InboxRequest, request_id: str, reply_to: str) -> str:
        conversation_id = conversation_id_of(f"inbox:{reply_to}:{request_id}")
        caller = Caller(conversation_id, STREAM, reply_to, request_id, is_headless=request.headless)
        if reply_to:
            await self._desk.callers.keep(caller)
        task = TaskRequest.model_validate(request.model_dump(exclude={"id"}))
        await self._desk.begin(task, conversation_id, request_id, awaited=caller.awaited if reply_to else "")
        return conversation_id

    async def _reject(
        self, entry: str, fields: list[bytes], request_id: str, reply_to: str, error: DeckhandsError
    ) -> None:
        if reply_to:
            conversation_id = conversation_id_of(f"inbox:{reply_to}:{request_id}")
            if not await self._desk.meta(conversation_id):
                await self._desk.callers.forget(conversation_id)
            reason = {"code": error.code, "message": error.message, "remedy": error.remedy}
            await self._replies.send(reply_to, request_id, "rejected", content=reason)
        await self._unreadable.put_aside(self._store.all_shards[0], INBOX, entry, fields, error)
        await self._done(entry)

    async def _done(self, entry: str) -> None:
        commands: list[tuple[Argument, ...]] = [("XACK", INBOX, GROUP, entry), ("XDEL", INBOX, entry)]
        await self._store.persist(lambda: self._store.connection.call_many(commands))

    async def _make_group(self) -> None:
        try:
            await self._store.persist(
                lambda: self._store.connection.call("XGROUP", "CREATE", INBOX, GROUP, "0", "MKSTREAM")
            )
        except StoreRefused as error:
            if "BUSYGROUP" not in error.message:
                raise


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
        raise UsageError("The field request is no JSON.", remedy="Send one JSON object in UTF-8.") from None
    if is_deeper(found, MAX_DEPTH):
        raise UsageError(f"The field request is nested more than {MAX_DEPTH} levels deep.")
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
    return name if isinstance(name, str) and 0 < len(name) <= MAX_KEY_CHARS else ""
