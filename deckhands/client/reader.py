"""The reading side of the client: conversations of the store, and archived ones as if they were in the store.

Holds: the store has precedence over the archive; a conversation that is being deleted from the store is read from the
archive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from broker.contract import Event, codec, decode_any
from broker.log import ConversationProgress, ConversationRow, Conversations, LogReader
from broker.runtime import BrokerSettings, CorruptEntry, StoreRefused, UnknownConversation
from broker.store import Store
from deckhands.client.connecting import open_cluster
from deckhands.client.reading.summary import Summary, Tally, find_quoted_texts, summarize

if TYPE_CHECKING:
    from broker.log import EventLog
    from deckhands.client.archive.archive import Archive, ArchivedConversation
    from deckhands.client.reasons.link import Why
    from deckhands.client.text_search import FoundConversation, TextSearch
    from deckhands.client.trajectories import Trajectory
    from deckhands.client.verification import Verification
    from deckhands.client.watcher import Watcher

_log = logging.getLogger(__name__)


class Reader:
    """The conversations of a store and of an archive."""

    def __init__(self, store: Store, archive: str = "") -> None:
        self.store = store
        self.archive = _open_archive(archive, store) if archive else None
        self._conversations = Conversations(store)
        self.log_reader = LogReader(store)

    # A command that only shows a log needs neither of these, and their imports take a quarter of its time.
    @cached_property
    def log(self) -> EventLog:
        """The logs of the store, to read and to write."""
        from broker.log import EventLog

        return EventLog(self.store)

    @cached_property
    def watcher(self) -> Watcher:
        """The watcher of the store's conversations."""
        from broker.log import EndedStream, record_gap
        from deckhands.client.watcher import Watcher

        name_loss = partial(record_gap, self.log, noticed_by="a client that waited for the conversation")
        return Watcher(_StoreSource(self), name_loss, make_stream=partial(EndedStream, self.store))

    @classmethod
    async def connect(
        cls, url: str | None = None, *, shards: int | None = None, patience_seconds: float | None = 30.0
    ) -> Self:
        """Connect to a store; `open_store` lists the other errors.

        Args:
            url: `redis://…`, `rediss://…` or `unix://…`. None: DECKHANDS_URL if set, else the cluster of
                `deckhands up` on this machine.
            shards: the number of shards of a new store; None: DECKHANDS_SHARDS.
            patience_seconds: how long a call is retried while the store does not answer; None for no limit.

        Raises:
            NoCluster: no URL is given or set, and no cluster is running here.
        """
        from broker.tools import refuse_while_importing

        refuse_while_importing()
        store = await open_cluster(url, shards=shards, patience_seconds=patience_seconds)
        return cls(store, BrokerSettings.from_env().archive)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection; pending waits raise StoreUnavailable."""
        if self.archive is not None:
            self.archive.listing.close()
        if "text_search" in self.__dict__:
            self.text_search.close()
        if "watcher" in self.__dict__:
            await self.watcher.aclose()
        await self.store.aclose()

    async def is_archived(self, conversation_id: str) -> bool:
        """Return whether the archive has a conversation."""
        return self.archive is not None and await self.archive.has(conversation_id)

    async def events(
        self, conversation_id: str, *, after: int = 0, is_whole: bool = False, is_lenient: bool = False
    ) -> list[Event]:
        """Return the events above `after`, in order.

        Args:
            is_whole: return long texts whole; the log itself contains only their head and tail.
            is_lenient: return events of a newer version as `UnknownEvent`, for callers that only show them.

        Raises:
            UnknownConversation: no such conversation.
            CorruptEntry: an entry is damaged or missing; carries the id of the event.
        """
        pages = self.pages(conversation_id, after=after, is_whole=is_whole, is_lenient=is_lenient)
        return [event async for page in pages for event in page]

    async def pages(
        self,
        conversation_id: str,
        *,
        after: int = 0,
        is_whole: bool = False,
        is_lenient: bool = False,
        first_size: int | None = None,
    ) -> AsyncGenerator[list[Event], None]:
        """Yield the events of `events` in pages, see `LogReader.read_pages`; raises the same errors."""
        decode = decode_any if is_lenient else codec.decode
        last_id = after
        try:
            pages = self.log_reader.read_pages(conversation_id, after=after, decode=decode, first_size=first_size)
            async for page in pages:
                restore = self.log_reader.blobs.restore_event
                yield [await restore(conversation_id, event) for event in page] if is_whole else page
                last_id = page[-1].id
            if after and last_id == after:
                await self.log_reader.load_last_id(conversation_id)
        except (UnknownConversation, CorruptEntry):
            if self.archive is None:
                raise
            archived = await self.archive.events(conversation_id, after=last_id, is_whole=is_whole, decode=decode)
            if archived is None:
                raise
            yield archived

    async def tail(
        self,
        conversation_id: str,
        *,
        after: int = 0,
        is_whole: bool = False,
        is_lenient: bool = False,
        is_endless: bool = False,
    ) -> AsyncGenerator[Event, None]:
        """Yield the events above `after`, then each new one as it is appended, until the conversation has settled.

        A conversation has settled when nothing more happens in it without input; see `wait_until_settled`. Takes the
        arguments of `events` and raises the errors of `tail_recording_gaps`.

        Args:
            is_endless: continue after the conversation has settled; then only its archiving ends the events.
        """
        from broker.log import tail_recording_gaps
        from deckhands.client.watcher import tail_until_settled

        if not is_endless:
            before = await self.events(conversation_id, is_lenient=True) if after else []
            known = [event for event in before if event.id <= after]
            tail = self.tail(conversation_id, after=after, is_whole=is_whole, is_lenient=is_lenient, is_endless=True)
            ending = tail_until_settled(self, conversation_id, tail, known=known, after=after)
            async with contextlib.aclosing(ending) as events:
                async for event in events:
                    yield event
            return
        decode = decode_any if is_lenient else codec.decode
        try:
            await self.log.load_last_id(conversation_id)
        except UnknownConversation:
            for event in await self.events(conversation_id, after=after, is_whole=is_whole, is_lenient=is_lenient):
                yield event
            return
        async with contextlib.aclosing(
            tail_recording_gaps(self.log, conversation_id, after=after, decode=decode)
        ) as events:
            async for event in events:
                yield await self.log.blobs.restore_event(conversation_id, event) if is_whole else event

    async def summary(self, conversation_id: str) -> Summary:
        """Return the summary of a conversation, with whole texts; raises the errors of `events`."""
        return summarize(await load_quoted_texts(self, conversation_id, await self.events(conversation_id)))

    async def why(self, conversation_id: str, *, shows_workers: bool = True, worker_logs: Path | None = None) -> Why:
        """Return the chain of reasons for a conversation's state, down to the cause.

        Args:
            shows_workers: include the names of workers and nodes.
            worker_logs: the folder with the logs of workers on this machine; a dead letter quotes them.

        Raises:
            UnknownConversation: no such conversation.
            CorruptEntry: an entry is damaged or missing; carries the id of the event.
        """

        async def read(name: str) -> list[Event]:
            return await self.events(name, is_lenient=True)

        from deckhands.client.reasons.reader import Reasons

        reasons = Reasons(self.store, read, shows_workers=shows_workers, worker_logs=worker_logs)
        return await reasons.why(conversation_id)

    async def trajectory(self, conversation_id: str) -> Trajectory:
        """Return the exact tokens of a rollout, both of its prompts and of the model's samples.

        A conversation in progress is read up to its last event. A conversation that is no rollout has no segments.

        Raises:
            UnknownConversation: no such conversation.
            CorruptEntry: an entry or a record of tokens is damaged or missing.
        """
        from deckhands.client.trajectories import read_trajectory

        events = await self.events(conversation_id, is_lenient=True)
        return await read_trajectory(self.log, self.archive, conversation_id, events)

    async def verify(self, conversation_id: str) -> Verification:
        """Check a log, in the store or the archive, against the specification of a log.

        A conversation in progress is checked up to its last event, and against the index unless it grows meanwhile.

        Raises:
            UnknownConversation: no such conversation.
        """
        from broker.log import LogViolation
        from deckhands.client.archive.storage import CorruptArchive
        from deckhands.client.verification import Verification, verify_log

        try:
            row = await self.row(conversation_id)
        except UnknownConversation:
            row = None  # archived
        try:
            events = await self.events(conversation_id, is_lenient=True)
            is_still = row is not None and await self.row(conversation_id) == row
        except (CorruptEntry, CorruptArchive) as error:
            return Verification(conversation_id, 0, (LogViolation("append", 0, error.message),))
        except UnknownConversation:
            if row is None:
                raise
            return await self.verify(conversation_id)  # archived meanwhile
        return await asyncio.to_thread(
            verify_log, conversation_id, events, conversation_id=conversation_id, row=row if is_still else None
        )

    async def wait_until_settled(self, conversation_id: str, *, timeout_seconds: float | None = None) -> Summary:
        """Wait until nothing more happens without input, as defined in `watcher`, and return the summary.

        Raises:
            NotSettled: not settled after `timeout_seconds`; it is also a `TimeoutError`.
            UnknownConversation: no such conversation, or it was deleted meanwhile.
        """
        return (await self.watcher.wait(conversation_id, timeout_seconds=timeout_seconds)).summary

    async def recent(self, *, limit: int = 50) -> Sequence[ConversationRow]:
        """Return up to `limit` conversations, newest first."""
        return await self._conversations.list_recent(limit=limit)

    async def list_archived(
        self, *, labels: Mapping[str, str] | None = None, states: Collection[str] = ()
    ) -> AsyncGenerator[ArchivedConversation, None]:
        """Yield the archived conversations, the last archived first; none without an archive.

        A file that cannot be used is logged and left out. There is no index, so every file may have to be read.

        Args:
            labels: only conversations that have all of these.
            states: only conversations in one of these states; empty: any.

        Raises:
            ArchiveUnavailable: the archive cannot be used.
        """
        if self.archive is None:
            return
        from broker.log import Selection
        from deckhands.client.archive.archive import describe_all

        selection = Selection(labels or {}, frozenset(states))
        pages = describe_all(self.archive, await self.archive.names(), lambda error: _log.warning("%s", error))
        async for page in pages:
            for one in page:
                if selection.matches(one.state, one.labels):
                    yield one

    @cached_property
    def text_search(self) -> TextSearch:
        """The search in the texts of conversations."""
        from deckhands.client.text_search import TextSearch

        return TextSearch(self.log_reader, self.archive)

    async def search(
        self,
        text: str,
        *,
        labels: Mapping[str, str] | None = None,
        states: Collection[str] = (),
        tenant: str | None = None,
        place: Literal["", "store", "archive"] = "",
    ) -> AsyncGenerator[FoundConversation, None]:
        """Yield the conversations with a text that has all words: their title, task or any other event.

        Conversations of the store come first, then archived ones, each newest first. There is no index, so every log
        may have to be read; `text_search` searches in bounded steps.

        Args:
            text: up to ten words; upper and lower case are the same.
            labels: only conversations that have all of these.
            states: only conversations in one of these states; empty: any.
            tenant: only this tenant's; None: of all.
            place: `store` or `archive`: search only this; empty: both.

        Raises:
            UsageError: no words, or too many.
            ArchiveUnavailable: the archive cannot be used.
        """
        from broker.log import Selection
        from deckhands.client.text_search import SearchQuery

        query = SearchQuery.parse(text, Selection(labels or {}, frozenset(states), tenant), place)
        cursor: str | None = ""
        while cursor is not None:
            page = await self.text_search.load_page(query, cursor)
            for found in page.found:
                yield found
            cursor = page.next_cursor

    async def last_id(self, conversation_id: str) -> int:
        """Return the id of the last event of a conversation, in the store or in the archive.

        Raises:
            UnknownConversation: no such conversation.
        """
        try:
            return await self.log.load_last_id(conversation_id)
        except UnknownConversation:
            if self.archive is None:
                raise
            return (await self.events(conversation_id, is_lenient=True))[-1].id

    async def row(self, conversation_id: str) -> ConversationRow:
        """Return the row of a conversation in a listing.

        Raises:
            UnknownConversation: the conversation is not in the store.
        """
        return await self._conversations.load_row(conversation_id)

    async def _tally(self, conversation_id: str) -> Tally:
        return Tally.of(await load_quoted_texts(self, conversation_id, await self.events(conversation_id)))


def _open_archive(url: str, store: Store) -> Archive:
    from deckhands.client.archive.archive import Archive

    return Archive(url, store.encryption)


@dataclass(frozen=True, slots=True)
class _StoreSource:
    """The conversations of a store, as a source for its watcher."""

    reader: Reader

    async def progress(self, conversation_ids: Sequence[str]) -> Sequence[ConversationProgress | None]:
        return await Conversations(self.reader.store).load_progress(conversation_ids)

    async def read(self, conversation_id: str) -> Sequence[Event]:
        events = await self.reader.events(conversation_id, is_lenient=True)
        return await load_quoted_texts(self.reader, conversation_id, events)


async def load_quoted_texts(reader: Reader, conversation_id: str, events: Sequence[Event]) -> list[Event]:
    """Return the events, with whole texts where a summary quotes them; the log holds only the head and tail.

    A text that is lost or damaged stays as it is in the log.
    """
    found = list(events)
    for place in find_quoted_texts(found):
        found[place] = await _load_whole(reader, conversation_id, found[place])
    return found


async def _load_whole(reader: Reader, conversation_id: str, event: Event) -> Event:
    if not event.blobs:
        return event
    with contextlib.suppress(CorruptEntry, StoreRefused):
        return await reader.log.blobs.restore_event(conversation_id, event)
    if reader.archive is not None:
        from deckhands.client.archive.storage import CorruptArchive

        after = event.id - 1
        with contextlib.suppress(CorruptArchive):
            found = await reader.archive.events(conversation_id, after=after, is_whole=True, decode=decode_any)
            return found[0] if found else event
    return event
