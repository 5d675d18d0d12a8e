"""Searches the texts of all conversations: those of the store first, then those of the archive, each newest first.

A search is a scan without an index. A call reads for a limited time and a limited number of characters, and returns a
cursor at which the next call continues, also in the middle of a long log.

A large archived log is read once: a search that its call has interrupted keeps the file open for the next call. If that
call reaches another process, or comes late, it skips the start of the log again.

Holds: a call always advances. A cursor is untrusted: it decides where a call continues, never what it may see. Texts
are compared as they are in the log, where secrets are masked.
Does not: find a conversation again that was restored during the search; search what is the same in most conversations:
system prompts, settings, and what was read from the workspace at the start.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from broker.contract import (
    BlobRef,
    ConversationCreated,
    Event,
    RecallObservation,
    SurveyObservation,
    SystemMessageAction,
    codec,
    decode_any,
)
from broker.log import ConversationQuery, ConversationRow, Conversations, EntryPage, LogReader, Selection
from broker.runtime import (
    SYSTEM_CLOCK,
    CorruptEntry,
    DataLocked,
    EventsLost,
    StoreRefused,
    UnknownConversation,
    UsageError,
    from_millis,
    is_conversation_id,
    to_millis,
)
from deckhands.client.archive.archived_file import SUMMARY, Manifest, SummaryNumbers
from deckhands.client.archive.listing import KEPT_SECONDS, POSITION_BYTES, read_time
from deckhands.client.archive.storage import ArchiveUnavailable, CorruptArchive

if TYPE_CHECKING:
    from broker.store import Cipher
    from deckhands.client.archive.archive import Archive
    from deckhands.client.archive.archived_file import ArchivedFile

MAX_TEXT_CHARS = 300
MAX_WORDS = 10
SNIPPET_CHARS = 200
LIMIT_SECONDS = 2.0
"""How long a call reads; it may take longer by one event, and by unpacking the start of a log that was not kept."""
LIMIT_CHARS = 64 * 2**20
"""The number of characters that a call compares."""
THREADS = 4
PAGE_EVENTS = 200
"""The events that are read from the store at once; most logs are no longer."""
TEXT_BYTES = 4 * 2**20
"""The size of the long texts that are read from the store at once."""
EVENT_CHARS = 200
"""What an event costs besides its texts, in characters that could be compared in the time of decoding it."""
ROWS_AT_ONCE = 50
FILES_AT_ONCE = 8
KEPT_FILES = 4
"""Interrupted searches in archived logs that are kept, each with an open file."""
SKIPPED = frozenset(
    kind.model_fields["kind"].default for kind in (SystemMessageAction, RecallObservation, SurveyObservation)
)
CREATED = ConversationCreated.model_fields["kind"].default
_BOOKKEEPING = frozenset(
    {"id", "kind", "source", "cause_id", "timestamp", "tool_call_metadata", "traceparent", "blobs"}
)
_PICTURE = re.compile(r"data:image/[a-z0-9.+-]+;base64,[A-Za-z0-9+/=]*")
_UNREADABLE = (CorruptEntry, CorruptArchive, DataLocked, EventsLost, StoreRefused)


@dataclass(frozen=True, slots=True)
class TextMatch:
    """Where a conversation has the words.

    Attributes:
        event_id: the first event that has them; None: the title.
        snippet: up to 200 characters around the first word.
    """

    event_id: int | None
    snippet: str


@dataclass(frozen=True, slots=True)
class FoundConversation:
    """A conversation that a search has found.

    Attributes:
        updated: when it was last continued; None if its file does not say it.
        is_archived: it is in the archive.
        iterations, cost_usd, has_unknown_cost: as in `Summary`.
    """

    conversation_id: str
    title: str
    state: str
    tenant: str
    labels: Mapping[str, str]
    updated: datetime | None
    is_archived: bool
    match: TextMatch
    iterations: int = 0
    cost_usd: float = 0.0
    has_unknown_cost: bool = False


@dataclass(frozen=True, slots=True)
class SearchPage:
    """The result of one call.

    Attributes:
        found: the conversations that have the words, newest first.
        searched: the number of conversations that this call has searched to their end.
        unreadable: the number of those whose log is damaged, or encrypted with a key that is not known here.
        place: where the next call continues: `store`, `archive`, or `listing` while the archive is being listed.
        reached: the search has seen what was created (in the archive: written) after this time; None: not known.
        next_cursor: for the next call; None at the end.
    """

    found: tuple[FoundConversation, ...]
    searched: int
    unreadable: int
    place: Literal["store", "listing", "archive"]
    reached: datetime | None
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """What to search for.

    Attributes:
        words: in lower case; all of them are in one text.
        selection: the conversations to search; its labels, states and tenant are compared.
        place: `store` or `archive` for one of them only; empty for both.
    """

    words: tuple[str, ...]
    selection: Selection = field(default_factory=Selection)
    place: Literal["", "store", "archive"] = ""

    @classmethod
    def parse(
        cls, text: str, selection: Selection | None = None, place: Literal["", "store", "archive"] = ""
    ) -> SearchQuery:
        """Return the query for a text of words.

        Raises:
            UsageError: no words, more than ten, or more than 300 characters.
        """
        words = tuple(dict.fromkeys(text.lower().split()))
        if not words:
            raise UsageError("The search has no words.", remedy="Give at least one.")
        if len(text) > MAX_TEXT_CHARS or len(words) > MAX_WORDS:
            raise UsageError(
                f"The search has {len(words)} words and {len(text):,} characters.",
                remedy=f"Give up to {MAX_WORDS} words, up to {MAX_TEXT_CHARS} characters together.",
            )
        return cls(words, selection or Selection(), place)

    def find_in_log(self, title: str, events: Iterable[Event]) -> TextMatch | None:
        """Return the match in a title or a log; None if neither has one."""
        call = _Call(self, _Budget(math.inf, sys.maxsize), 1)
        return call.find_in_title(title) or call.find_in_events(events, {})[0]

    def find_in(self, text: str) -> str | None:
        """Return the snippet of a text that has all words; None if it lacks one."""
        lowered = text.lower()
        if not all(word in lowered for word in self.words):
            return None
        first = min(lowered.index(word) for word in self.words)
        start = max(0, min(first - SNIPPET_CHARS // 4, len(text) - SNIPPET_CHARS))
        end = start + SNIPPET_CHARS
        snippet = re.sub(r"\s+", " ", text[start:end]).strip()
        return f"{'…' if start else ''}{snippet}{'…' if end < len(text) else ''}"


@dataclass(slots=True)
class _Budget:
    """What a call may still read."""

    deadline: float
    chars: int

    @property
    def is_spent(self) -> bool:
        return self.chars <= 0 or SYSTEM_CLOCK.monotonic() >= self.deadline

    @property
    def seconds(self) -> float:
        return max(0.0, self.deadline - SYSTEM_CLOCK.monotonic())


@dataclass(frozen=True, slots=True)
class _Cursor:
    """Where a search continues.

    Attributes:
        before: the position in the store's index after which it continues; None for its start.
        position: the same in the archive; None while the search is in the store, empty for the start of the archive.
        since: at the start of the archive, when the search came to it, in Unix milliseconds.
        after: above 0 if it continues in the log at the position itself, after this event.
    """

    before: tuple[float, str] | None = None
    position: bytes | None = None
    after: int = 0
    since: int = 0

    @classmethod
    def start_archive(cls) -> _Cursor:
        return cls(position=b"", since=int(1_000 * SYSTEM_CLOCK.now().timestamp()))

    def render(self) -> str:
        if self.position == b"":
            text = f"l:{self.since}"
        elif self.position is not None:
            text = f"a:{self.after}:{self.position.hex()}"
        else:
            text = f"s:{self.after}:{self.before[0]:.0f}:{self.before[1]}" if self.before else "s"
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str, place: Literal["", "store", "archive"]) -> _Cursor:
        """Return the cursor of a text.

        Raises:
            UsageError: it is none, or lies outside of the place that is searched.
        """
        cursor = cls._parse(text)
        if cursor is None or place == ("archive" if cursor.position is None else "store"):
            raise UsageError("The cursor cannot be used.", remedy="Pass `next_cursor` of the previous page.")
        return cursor

    @classmethod
    def _parse(cls, text: str) -> _Cursor | None:
        try:
            raw = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True).decode()
            if found := re.fullmatch(rf"a:(\d{{1,15}}):([0-9a-f]{{{2 * POSITION_BYTES}}})", raw, re.ASCII):
                return cls(position=bytes.fromhex(found[2]), after=int(found[1]))
            if found := re.fullmatch(r"l:(\d{1,15})", raw, re.ASCII):
                return cls(position=b"", since=int(found[1]))
            if found := re.fullmatch(r"s:(\d{1,15}):(\d{1,15}):(.{1,64})", raw, re.ASCII):
                from_millis(int(found[2]))  # ValueError: a time after the year 9999
                if is_conversation_id(found[3]):
                    return cls(before=(float(found[2]), found[3]), after=int(found[1]))
            elif raw == "s":
                return cls()
        except (binascii.Error, ValueError):
            pass
        return None


class _StoreSearch:
    """The search in the conversations of a store. Threads decode and compare their events."""

    def __init__(self, reader: LogReader, threads: ThreadPoolExecutor) -> None:
        self._reader = reader
        self._threads = threads

    async def search(self, call: _Call, cursor: _Cursor) -> _Cursor | None:
        """Search the store; return where to continue, or None at its end."""
        selected = ConversationQuery(self._reader.store, call.query.selection)
        place = cursor.before
        if cursor.after and place is not None:
            rows = await selected.load_matching_rows([place[1]])  # of another tenant: none
            if rows and (stopped := await self._search_row(call, rows[0], cursor.after)):
                return _Cursor(place, after=stopped)
        while True:
            rows, following = await selected.load_page(place, limit=ROWS_AT_ONCE)
            for row in rows:
                if call.is_over:
                    return _Cursor(place)
                place = (float(to_millis(row.created)), row.conversation_id)
                if stopped := await self._search_row(call, row, 0):
                    return _Cursor(place, after=stopped)
            place = following
            call.advance()
            if place is None or call.is_over:
                return None if place is None else _Cursor(place)

    async def _search_row(self, call: _Call, row: ConversationRow, after: int) -> int:
        """Search a conversation of the store; return the event at which the budget ended it, or 0."""
        cid = row.conversation_id
        match = None if after else call.find_in_title(row.title)
        is_readable = True
        try:
            if match is None:
                pages = self._reader.read_entries(cid, after=after, size=PAGE_EVENTS)
                async with aclosing(pages):
                    async for page in pages:
                        match, stopped = await self._search_page(call, cid, page)
                        if match is not None:
                            break
                        if stopped:
                            return stopped
        except UnknownConversation:  # archived or deleted meanwhile
            return 0
        except _UNREADABLE:
            is_readable = False
        call.count(is_readable=is_readable)
        if match is not None:
            call.found.append(_describe_row(row, match))
        return 0

    async def _search_page(self, call: _Call, conversation_id: str, page: EntryPage) -> tuple[TextMatch | None, int]:
        """Return the match in a page, if any, and the event at which the budget ended the search, or 0."""
        run = partial(asyncio.get_running_loop().run_in_executor, self._threads)
        for events in await run(_decode_page, page):
            texts = await self._fetch_texts(conversation_id, events)
            match, stopped = await run(call.find_in_events, events, texts)
            if match is not None or stopped:
                return match, stopped
        return None, 0

    async def _fetch_texts(self, conversation_id: str, events: Sequence[Event]) -> dict[str, bytes]:
        """Return the long texts of events by address, without those that cannot be read."""
        addresses = [ref.sha256 for event in events for ref in _find_texts(event)]
        if not addresses:
            return {}
        try:
            return await self._reader.blobs.fetch(conversation_id, addresses)
        except _UNREADABLE:
            if len(events) == 1:
                return {}
            half = len(events) // 2
            first = await self._fetch_texts(conversation_id, events[:half])
            return first | await self._fetch_texts(conversation_id, events[half:])


def _decode_page(page: EntryPage) -> list[list[Event]]:
    """Return the events of a page in groups, each with long texts of up to `TEXT_BYTES` or with a single event."""
    groups: list[list[Event]] = [[]]
    size = 0
    for event in page.decode(decode_any):
        more = sum(ref.size_bytes for ref in _find_texts(event))
        if size + more > TEXT_BYTES and groups[-1]:
            groups.append([])
            size = 0
        groups[-1].append(event)
        size += more
    return groups


def _find_texts(event: Event) -> list[BlobRef]:
    """Return the long texts of an event that are searched."""
    if not event.blobs or event.kind in SKIPPED:
        return []
    return [ref for path, ref in event.blobs.items() if not codec.is_binary(path)]


def _restore_whole(event: Event, texts: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the wire form of an event with its long texts; with their ends if they cannot be read."""
    fields = event.wire()
    if _find_texts(event):
        with suppress(CorruptEntry):
            return codec.restore(fields, texts)
    return fields


class TextSearch:
    """Searches the conversations of a store and of an archive; either of them may be missing."""

    def __init__(self, reader: LogReader | None, archive: Archive | None) -> None:
        self._archive = archive
        self._kept = _KeptSearches()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="text-search")
        self._store = None if reader is None else _StoreSearch(reader, self._threads)
        self._conversations = None if reader is None else Conversations(reader.store)

    async def load_page(
        self,
        query: SearchQuery,
        cursor: str = "",
        *,
        limit: int = 20,
        limit_seconds: float = LIMIT_SECONDS,
        limit_chars: int = LIMIT_CHARS,
    ) -> SearchPage:
        """Search on from a cursor until `limit` conversations are found or one of the limits is reached.

        Raises:
            UsageError: the cursor is none, or one of a search in another place.
            ArchiveUnavailable: the archive cannot be used.
        """
        store = None if query.place == "archive" else self._store
        archive = None if query.place == "store" else self._archive
        start = _Cursor() if store is not None else _Cursor.start_archive()
        if cursor:
            start = _Cursor.parse(cursor, query.place)
        call = _Call(query, _Budget(SYSTEM_CLOCK.monotonic() + limit_seconds, limit_chars), limit)
        place: _Cursor | None = start
        if start.position is None:
            place = None if store is None else await store.search(call, start)
            if place is None and archive is not None:
                place = _Cursor.start_archive()
        if place is not None and place.position is not None:
            if archive is None:
                place = None
            elif not call.is_over:
                return await self._search_archive(call, archive, place)
        return call.finish(place)

    async def _search_archive(self, call: _Call, archive: Archive, cursor: _Cursor) -> SearchPage:
        position, after = cursor.position or b"", cursor.after
        since = read_time(position) if position else cursor.since / 1_000
        index = await archive.listing.load(since=since, limit_seconds=call.budget.seconds)
        if index is None:
            return call.finish(cursor, is_listing=True)
        inside = index.find_at(position) if after else None
        files = [inside] if inside else index.find_after(position, FILES_AT_ONCE)
        cursor = cursor if inside else replace(cursor, after=0)
        while files:
            if call.is_over:
                return call.finish(cursor)
            stopped = await self._search_files(call, archive, files, cursor)
            if stopped is not None:
                return call.finish(stopped)
            call.advance()
            cursor = _Cursor(position=files[-1][0])
            files = index.find_after(files[-1][0], FILES_AT_ONCE)
        return call.finish(None)

    async def _search_files(
        self, call: _Call, archive: Archive, files: Sequence[tuple[bytes, str]], cursor: _Cursor
    ) -> _Cursor | None:
        """Search some files at once; return where to continue if that is not after the last of them."""
        names = [name for _, name in files]
        rows: Sequence[object] = [None] * len(names)
        if self._conversations is not None:
            rows = await self._conversations.load_selection_fields(names)
        searches = [
            self._kept.take(name, cursor.after) or _FileSearch(archive, name, cursor.after)
            for name, row in zip(names, rows, strict=True)
            if row is None
        ]
        results = await asyncio.gather(
            *(
                self._search_file(call, search, must_read=search is searches[0] and not call.has_advanced)
                for search in searches
            ),
            return_exceptions=True,
        )
        by_name = {search.name: (search, result) for search, result in zip(searches, results, strict=True)}
        kept = None
        try:
            for position, name in files:
                search, result = by_name.get(name, (None, None))
                if isinstance(result, BaseException):
                    raise result
                if search is not None and result is not None:
                    if not result.is_reached:
                        return cursor
                    if result.is_interrupted:
                        kept = search
                        self._kept.add(search)
                        return _Cursor(position=position, after=search.after)
                    if result.is_selected:
                        call.count(is_readable=result.is_readable)
                    if result.found is not None:
                        call.found.append(result.found)
                call.advance()
                cursor = _Cursor(position=position)
                if len(call.found) >= call.limit:
                    return cursor
            return None
        finally:
            for search in searches:
                if search is not kept:
                    search.close()

    async def _search_file(self, call: _Call, search: _FileSearch, *, must_read: bool) -> _FileResult:
        run = partial(asyncio.get_running_loop().run_in_executor, self._threads)
        is_locked = _FileResult(is_selected=True, is_readable=False)
        try:
            cipher: Cipher | None = None
            while True:
                result = await run(partial(search.run, call, cipher, must_read=must_read))
                if isinstance(result, _FileResult):
                    return result
                cipher = await search.archive.load_cipher(result)
                if cipher is None:
                    return is_locked
        except DataLocked:
            return is_locked
        except CorruptArchive:  # its tenant is not known, so it is nobody's
            return _FileResult() if call.query.selection.tenant is not None else is_locked

    def close(self) -> None:
        """Close the files of interrupted searches. Idempotent."""
        self._kept.close()
        self._threads.shutdown(wait=False)


@dataclass(slots=True)
class _Call:
    """The progress of one call."""

    query: SearchQuery
    budget: _Budget
    limit: int
    found: list[FoundConversation] = field(default_factory=list)
    searched: int = 0
    unreadable: int = 0
    has_advanced: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the call ends at the next conversation; never before it has read anything."""
        return len(self.found) >= self.limit or (self.has_advanced and self.budget.is_spent)

    def advance(self) -> None:
        """Note that the next call can continue further on than this one."""
        self.has_advanced = True

    def count(self, *, is_readable: bool) -> None:
        """Count a conversation that was searched to its end."""
        self.searched += is_readable
        self.unreadable += not is_readable
        self.advance()

    def find_in_title(self, title: str) -> TextMatch | None:
        """Return the match in a title, if any."""
        snippet = self.query.find_in(title)
        return None if snippet is None else TextMatch(None, snippet)

    def find_in_events(self, events: Iterable[Event], texts: Mapping[str, bytes]) -> tuple[TextMatch | None, int]:
        """Return the first match, if any, and the event at which the budget ended the search, or 0."""
        for event in events:
            if (match := self.find_in_fields(event.id, _restore_whole(event, texts))) is not None:
                return match, 0
            if self.budget.is_spent:
                return None, event.id
        return None, 0

    def find_in_fields(self, event_id: int, fields: dict[str, Any]) -> TextMatch | None:
        """Return the match in the wire form of an event, if any."""
        text = "\n".join(_texts_of(fields))
        self.budget.chars -= len(text) + EVENT_CHARS
        snippet = self.query.find_in(text)
        return None if snippet is None else TextMatch(event_id, snippet)

    def finish(self, cursor: _Cursor | None, *, is_listing: bool = False) -> SearchPage:
        """Return the page."""
        place: Literal["store", "listing", "archive"] = "store"
        reached = None
        if cursor is not None and cursor.position is not None:
            place = "listing" if is_listing else "archive"
            reached = datetime.fromtimestamp(read_time(cursor.position), UTC) if cursor.position else None
        elif cursor is not None and cursor.before is not None:
            reached = from_millis(int(cursor.before[0]))
        following = None if cursor is None else cursor.render()
        return SearchPage(tuple(self.found), self.searched, self.unreadable, place, reached, following)


@dataclass(frozen=True, slots=True)
class _FileResult:
    """What a call has found in a file.

    Attributes:
        is_reached: False if the call had no time left to open the file.
        is_interrupted: the search is to be continued after `_FileSearch.after`.
        is_selected: the file exists, and its conversation is one of those to search.
    """

    is_reached: bool = True
    is_interrupted: bool = False
    is_selected: bool = False
    is_readable: bool = True
    found: FoundConversation | None = None


class _FileSearch:
    """The search in one archived file, which calls interrupt and continue.

    Attributes:
        after: the last event that was searched.
    """

    def __init__(self, archive: Archive, name: str, after: int) -> None:
        self.archive = archive
        self.name = name
        self.after = after
        self._stack = ExitStack()
        self._file: ArchivedFile | None = None
        self._events: Iterator[dict[str, Any]] = iter(())
        self._size: int | None = None

    def run(self, call: _Call, cipher: Cipher | None = None, *, must_read: bool) -> _FileResult | Manifest:
        """Search on until the call's budget is spent. Blocks.

        Args:
            must_read: search at least one event, however little is left of the budget.

        Returns:
            The result; or the manifest if the cipher is needed first.
        """
        if call.budget.is_spent and not must_read:
            return _FileResult(is_reached=False)
        try:
            with self._stack as stack:  # closes the file, unless the search continues
                result = self._search(stack, call, cipher)
                if isinstance(result, Manifest) or result.is_interrupted:
                    self._stack = stack.pop_all()
                return result
        except ArchiveUnavailable:
            if self.archive.find_size(self.name) is None:  # just removed
                return _FileResult()
            raise

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._stack.close()

    def _search(self, stack: ExitStack, call: _Call, cipher: Cipher | None) -> _FileResult | Manifest:
        size = self.archive.find_size(self.name)
        if size is None:
            return _FileResult()
        if self._file is None or size != self._size:
            stack.close()
            self._size = size
            self._file = stack.enter_context(self.archive.open_file(self.name))
            self._events = self._file.scan_events(after=self.after)
        file, manifest = self._file, self._file.manifest
        if not call.query.selection.matches(manifest.state, manifest.labels, tenant=manifest.tenant):
            return _FileResult()
        if manifest.data_key:
            if cipher is None:
                return manifest
            file.unlock(cipher)
        match = None if self.after else call.find_in_title(manifest.title)
        if match is None:
            for fields in self._events:
                self.after = fields["id"]
                match = call.find_in_fields(self.after, _restore_from(file, fields))
                if match is not None:
                    break
                if call.budget.is_spent and self.after < manifest.last_event_id:
                    return _FileResult(is_interrupted=True)
        return _FileResult(is_selected=True, found=None if match is None else _describe_file(file, match))


class _KeptSearches:
    """The latest interrupted searches in archived files, by file and event."""

    def __init__(self) -> None:
        self._searches: dict[tuple[str, int], tuple[_FileSearch, asyncio.TimerHandle]] = {}

    def add(self, search: _FileSearch) -> None:
        """Keep a search for a while; the oldest one goes if there are too many."""
        key = search.name, search.after
        self._drop(key)
        if len(self._searches) >= KEPT_FILES:
            self._drop(next(iter(self._searches)))
        self._searches[key] = search, asyncio.get_running_loop().call_later(KEPT_SECONDS, self._drop, key)

    def take(self, name: str, after: int) -> _FileSearch | None:
        """Return the search that continues after an event; None if it is not kept."""
        search, expiry = self._searches.pop((name, after), (None, None))
        if expiry is not None:
            expiry.cancel()
        return search

    def close(self) -> None:
        """Close the files. Idempotent."""
        for key in [*self._searches]:
            self._drop(key)

    def _drop(self, key: tuple[str, int]) -> None:
        if (search := self.take(*key)) is not None:
            search.close()


def _describe_row(row: ConversationRow, match: TextMatch) -> FoundConversation:
    return FoundConversation(
        conversation_id=row.conversation_id,
        title=row.title,
        state=row.state,
        tenant=row.tenant,
        labels=row.labels,
        updated=row.updated,
        is_archived=False,
        match=match,
        iterations=row.iterations,
        cost_usd=row.cost_usd,
        has_unknown_cost=row.fields.get("has_unknown_cost", "0") == "1",
    )


def _describe_file(file: ArchivedFile, match: TextMatch) -> FoundConversation:
    manifest = file.manifest
    try:
        summary = json.loads(file.member(SUMMARY))
        numbers = SummaryNumbers.model_validate(summary)
        title = str(summary["title"]) if manifest.data_key else manifest.title
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        name = manifest.conversation_id
        raise CorruptArchive(f"The archived file of {name} cannot be used: its summary is not one.") from error
    return FoundConversation(
        conversation_id=manifest.conversation_id,
        title=title,
        state=manifest.state,
        tenant=manifest.tenant,
        labels=manifest.labels,
        updated=manifest.updated,
        is_archived=True,
        match=match,
        iterations=numbers.iterations,
        cost_usd=numbers.cost_usd,
        has_unknown_cost=numbers.has_unknown_cost,
    )


def _restore_from(file: ArchivedFile, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an event with its whole texts."""
    refs = fields.get("blobs")
    if not refs or fields.get("kind") in SKIPPED:
        return fields
    try:
        addresses = {str(ref["sha256"]) for path, ref in refs.items() if not codec.is_binary(path)}
        return codec.restore(fields, file.blobs(addresses))
    except (AttributeError, LookupError, TypeError, CorruptEntry) as error:
        name = file.manifest.conversation_id
        raise CorruptArchive(f"The archived file of {name} cannot be used: a text is missing.") from error


def _texts_of(fields: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of an event, in its wire form, that are searched."""
    kind = fields.get("kind")
    if kind == CREATED:
        yield str(fields.get("title") or "")
    elif kind not in SKIPPED:
        rest = [value for name, value in reversed(fields.items()) if name not in _BOOKKEEPING]
        while rest:
            value = rest.pop()
            if isinstance(value, str):
                if not _PICTURE.fullmatch(value):
                    yield value
            elif isinstance(value, dict):
                rest += reversed(value.values())
            elif isinstance(value, list):
                rest += reversed(value)
