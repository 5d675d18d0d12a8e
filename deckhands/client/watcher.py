"""The watcher: the only place that decides when a conversation has ended, and the only way to wait for it.

A conversation can be continued from any state, so an end is a moment in which no further event follows from the log
without input. Callers choose between three definitions of the end, see `Until`.

| state | `SETTLED` | `RESULT` | `OVER` |
|---|---|---|---|
| finished, rejected, error, stopped | ends | ends | ends |
| awaits input or a confirmation | ends | ends | waits |
| paused | ends | waits: a user holds it and resumes it | waits |
| every other state | waits | waits | waits |
| a message or a request that the agent has not read | waits | waits | waits |
| archived | ends, with the archived log | ends | ends |

Holds:
    - Unknown, deleted, or deleted while it is watched: `UnknownConversation`. A log that cannot be read:
      `CorruptEntry`. Either affects that conversation alone.
    - If the store lost the end of a log, a wait continues with the remaining log and records the gap in it. A reader of
      events (`follow`, `Client.tail`) gets `EventsLost` once the gap is recorded, because it has passed on lost events.
    - If the store is unreachable, it is retried for its `patience_seconds`; then every wait raises `StoreError`.
    - A timeout raises `NotSettled` and changes nothing.
    - The log decides. The index only shows which log to read, because its state is written with the events.
    - A wait adds no connection and no task: all waits of a watcher share one reader of the store's `EndedStream`, and
      one poll of all their conversations in turn, up to `POLLS_PER_SECOND`, which finds ends that are missing in the
      stream. `follow` costs a connection, because it passes on every event.
Does not:
    - Report an end twice, or revoke one. A message after a reported end starts a new wait.
    - Detect a loss if new events have replaced the lost ones between two polls.
    - Report an end at once if the stream does not name it: the next poll comes after 0.25 to 2 s (without a stream 0.05
      to 2 s, over HTTP 0.5 to 2 s), later if more conversations are watched.
    - Record a gap over HTTP; readers of the store do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, Self

from broker.contract import TERMINAL_STATES, WAITING_FOR_USER_STATES, AgentState, ConversationCreated, Event
from broker.log import ConversationProgress, Status
from broker.runtime import (
    CorruptEntry,
    DeckhandsError,
    EventsLost,
    StoreRefused,
    StoreUnavailable,
    UnknownConversation,
    UnknownKind,
)
from deckhands.client.errors import NotSettled
from deckhands.client.many import for_each
from deckhands.client.reading.summary import Summary, Tally

SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 2.0
LISTENING_PAUSE_SECONDS = 0.25
"""The shortest pause between two polls while a stream names the conversations that have settled."""
POLLS_PER_SECOND = 500
AT_ONCE = 500
"""The number of conversations in one poll."""
READ_AT_ONCE = 8
STATES = frozenset(AgentState)

_log = logging.getLogger(__name__)

UNREADABLE = (CorruptEntry, StoreRefused, UnknownConversation, UnknownKind)
"""The errors of one conversation; all others end every wait."""


class Until(Enum):
    """The definition of the end; see the table above. The value lists the states that can be an end."""

    SETTLED = TERMINAL_STATES | WAITING_FOR_USER_STATES
    """Nothing more happens without input: for users, and for programs that answer."""
    RESULT = TERMINAL_STATES | WAITING_FOR_USER_STATES - {AgentState.PAUSED}
    """There is a result: for programs that need only that, such as an evaluation or a task of a queue."""
    OVER = TERMINAL_STATES
    """The conversation is over, unless a user continues it."""

    def is_met(self, status: Status) -> bool:
        """Return whether a log with this status has ended."""
        return status.state in self.value and not status.is_unanswered

    def may_be_met(self, state: str) -> bool:
        """Return whether to read the log of a conversation that has this state in the index."""
        return state in self.value or state not in STATES


@dataclass(frozen=True, slots=True)
class End:
    """The end of a conversation, with its whole log; texts that a summary quotes are whole, too."""

    conversation_id: str
    summary: Summary
    events: Sequence[Event]


class ConversationSource(Protocol):
    """The conversations of a store, or of a server."""

    async def progress(self, conversation_ids: Sequence[str]) -> Sequence[ConversationProgress | None]:
        """Return the index entries of conversations; None for one without an entry, which is archived or unknown."""
        ...

    async def read(self, conversation_id: str) -> Sequence[Event]:
        """Return the log from the store or the archive; raises UnknownConversation and CorruptEntry."""
        ...


class SettledStream(Protocol):
    """The conversations of a store that have settled, as hints; see `EndedStream`."""

    async def open(self) -> None:
        """Start: `read` returns the conversations that settle from now on."""
        ...

    async def read(self) -> Sequence[str]:
        """Wait a few seconds and return the ids of conversations that have settled."""
        ...

    async def aclose(self) -> None:
        """Close the connection."""
        ...


OnEnd = Callable[[End | Exception], None]
OnLoss = Callable[[EventsLost], Awaitable[object]]


@dataclass(slots=True, eq=False)
class PendingWait:
    """One wait for one conversation.

    Attributes:
        progress: is kept up to date for the caller.
        judged: the progress of the conversation at the latest reading of its log for this wait.
    """

    until: Until
    on_end: OnEnd
    progress: ConversationProgress | None
    judged: ConversationProgress | None = None


@dataclass(slots=True)
class _Watched:
    waits: list[PendingWait]
    last: ConversationProgress | None = None


class Watcher:
    """Watches the conversations of one source, for any number of callers.

    Args:
        on_loss: records a gap in a log; None if another reader of the log does.
        make_stream: returns a new reader of the stream of settled conversations; None to only poll.
        shortest_pause_seconds: between two polls of the same conversation.
    """

    def __init__(
        self,
        source: ConversationSource,
        on_loss: OnLoss | None,
        *,
        make_stream: Callable[[], SettledStream] | None = None,
        shortest_pause_seconds: float = SHORTEST_PAUSE_SECONDS,
    ) -> None:
        self._source = source
        self._on_loss = on_loss
        self._make_stream = make_stream
        self._listening: asyncio.Task[None] | None = None
        self._is_listening = False
        self._shortest_pause_seconds = shortest_pause_seconds
        self._watched: dict[str, _Watched] = {}
        self._new: list[str] = []
        self._has_news = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def wait(
        self,
        conversation_id: str,
        *,
        until: Until = Until.SETTLED,
        timeout_seconds: float | None = None,
        progress: ConversationProgress | None = None,
    ) -> End:
        """Wait for the end of a conversation.

        Args:
            timeout_seconds: None for no limit.
            progress: is kept up to date meanwhile.

        Raises:
            NotSettled: the conversation has not ended within `timeout_seconds`.
            UnknownConversation: there is no such conversation, or it was deleted meanwhile.
            CorruptEntry: its log is damaged.
            StoreError: the store cannot be used.
        """
        found: asyncio.Future[End] = asyncio.get_running_loop().create_future()

        def take(end: End | Exception) -> None:
            if found.done():
                return
            if isinstance(end, End):
                found.set_result(end)
            else:
                found.set_exception(end)

        wait = self._add(conversation_id, PendingWait(until, take, progress))
        try:
            async with asyncio.timeout(timeout_seconds):
                return await found
        except TimeoutError:
            raise NotSettled(conversation_id, timeout_seconds) from None
        finally:
            self._discard(conversation_id, wait)

    def ends(self, until: Until = Until.SETTLED) -> Ends:
        """Return the ends of many conversations, in the order in which they end; a context manager."""
        return Ends(self, until)

    async def aclose(self) -> None:
        """Stop watching; pending waits raise StoreUnavailable. Idempotent."""
        tasks = [task for task in (self._running, self._listening) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail(StoreUnavailable("The client was closed.", remedy="Wait with a client that is open."))

    def _add(self, conversation_id: str, wait: PendingWait) -> PendingWait:
        self._watched.setdefault(conversation_id, _Watched([])).waits.append(wait)
        self._new.append(conversation_id)
        self._has_news.set()
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        if self._listening is None and self._make_stream is not None:
            self._listening = asyncio.create_task(self._listen(self._make_stream()))
        return wait

    def _discard(self, conversation_id: str, wait: PendingWait) -> None:
        watched = self._watched.get(conversation_id)
        if watched is None or wait not in watched.waits:
            return
        watched.waits.remove(wait)
        if not watched.waits:
            del self._watched[conversation_id]
        if not self._watched:
            self._has_news.set()  # the run ends

    async def _listen(self, stream: SettledStream) -> None:
        """Poll at once each conversation in the stream, until there are no waits left or the stream fails."""
        try:
            await stream.open()
            self._is_listening = True
            self._poll_soon(self._watched)  # what has settled since it was polled
            while True:
                ended = await stream.read()
                self._poll_soon(ended)
                if not ended and not self._watched:
                    return
        except DeckhandsError as error:
            _log.info("conversations are only polled: %s", error)
        finally:
            self._listening = None
            self._is_listening = False
            await stream.aclose()

    def _poll_soon(self, conversation_ids: Iterable[str]) -> None:
        if known := [conversation_id for conversation_id in conversation_ids if conversation_id in self._watched]:
            self._new += known
            self._has_news.set()

    async def _run(self) -> None:
        """Poll all conversations in turn, new ones at once, until none is left."""
        clock, due = asyncio.get_running_loop().time, 0.0
        try:
            while self._watched:
                self._has_news.clear()
                is_round = clock() >= due
                ids, self._new = (list(self._watched) if is_round else list(dict.fromkeys(self._new))), []
                for at in range(0, len(ids), AT_ONCE):
                    await for_each(await self._poll(ids[at : at + AT_ONCE]), self._judge, at_once=READ_AT_ONCE)
                if is_round:
                    pause = len(self._watched) / POLLS_PER_SECOND
                    shortest = LISTENING_PAUSE_SECONDS if self._is_listening else self._shortest_pause_seconds
                    due = clock() + min(max(pause, shortest), LONGEST_PAUSE_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, due - clock())):
                        await self._has_news.wait()
        except Exception as error:  # noqa: BLE001  (every wait gets it)
            self._fail(error)
        finally:
            self._running = None

    def _fail(self, error: Exception) -> None:
        watched, self._watched = self._watched, {}
        for one in watched.values():
            for wait in one.waits:
                wait.on_end(error)

    async def _poll(self, ids: Sequence[str]) -> list[str]:
        """Record the progress of conversations, and return those whose log may have ended."""
        found = []
        for conversation_id, progress in zip(ids, await self._source.progress(ids), strict=True):
            watched = self._watched.get(conversation_id)
            if watched is None:
                continue
            last, watched.last = watched.last, progress
            if progress is None:
                found.append(conversation_id)
                continue
            is_shorter = last and progress.last_id < last.last_id and progress.created_ms == last.created_ms
            if self._on_loss is not None and last and is_shorter:
                with contextlib.suppress(*UNREADABLE):
                    await self._on_loss(EventsLost(conversation_id, progress.last_id, last.last_id))
            for wait in watched.waits:
                if wait.progress is not None:
                    wait.progress.update_from(progress)
            if any(_should_judge(wait, progress) for wait in watched.waits):
                found.append(conversation_id)
        return found

    async def _judge(self, conversation_id: str) -> None:
        """Read a log, and finish the waits for which it has ended."""
        watched = self._watched.get(conversation_id)
        if watched is None:
            return
        progress = watched.last
        waits = list(watched.waits)  # a wait that is added while the log is read may know of later events
        found: End | Exception
        tally: Tally | None = None
        try:
            events = await self._source.read(conversation_id)
        except UNREADABLE as error:
            found = error
        else:
            if events and isinstance(events[0], ConversationCreated):
                tally = Tally.of(events)
                found = End(conversation_id, tally.summary(), events)
            else:
                found = CorruptEntry(f"The log of {conversation_id} does not start with the conversation.")
        for wait in waits:
            if tally is None or progress is None or wait.until.is_met(tally.status):
                self._discard(conversation_id, wait)
                wait.on_end(found)
            else:
                wait.judged = progress


def _should_judge(wait: PendingWait, progress: ConversationProgress) -> bool:
    judged = wait.judged
    has_news = judged is None or (judged.last_id, judged.updated_ms) != (progress.last_id, progress.updated_ms)
    return has_news and wait.until.may_be_met(progress.state)


class Ends:
    """The ends of many conversations. Iterate over it; conversations may be added meanwhile.

    Yields each conversation with its summary, or with the error that makes it unreadable. The iteration ends after
    `complete`, once none is left. It raises StoreError if the store is unavailable.
    """

    def __init__(self, watcher: Watcher, until: Until) -> None:
        self._watcher = watcher
        self._until = until
        self._waits: dict[str, PendingWait] = {}
        self._queue: asyncio.Queue[tuple[str, Summary | Exception] | None] = asyncio.Queue()
        self._is_complete = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for conversation_id, wait in self._waits.items():
            self._watcher._discard(conversation_id, wait)  # noqa: SLF001  (of this module)

    def add(self, conversation_id: str) -> None:
        """Also wait for this conversation. Idempotent until it ends."""
        if conversation_id not in self._waits:

            def take(end: End | Exception) -> None:
                self._queue.put_nowait((conversation_id, end.summary if isinstance(end, End) else end))

            self._waits[conversation_id] = self._watcher._add(conversation_id, PendingWait(self._until, take, None))  # noqa: SLF001

    def complete(self) -> None:
        """Declare that no more conversations will be added."""
        self._is_complete = True
        self._queue.put_nowait(None)

    @property
    def waiting(self) -> int:
        """The number of conversations that have not ended."""
        return len(self._waits)

    async def __aiter__(self) -> AsyncIterator[tuple[str, Summary | DeckhandsError]]:
        while self._waits or not self._is_complete:
            item = await self._queue.get()
            if item is None:
                continue
            conversation_id, found = item
            if not isinstance(found, (Summary, *UNREADABLE)):
                raise found
            del self._waits[conversation_id]
            yield conversation_id, found


class Followable(Protocol):
    """The methods of a client that `follow` needs."""

    def tail(
        self, conversation_id: str, *, after: int = 0, is_whole: bool = False, is_endless: bool = False
    ) -> AsyncGenerator[Event, None]:
        """See `Client.tail`."""
        ...

    async def last_id(self, conversation_id: str) -> int:
        """Return the id of the last event."""
        ...


async def follow(
    client: Followable,
    conversation_id: str,
    tally: Tally,
    *,
    until: Until = Until.SETTLED,
    is_whole: bool = False,
) -> AsyncGenerator[Event, None]:
    """Yield each new event of a conversation until its end; ends also when the conversation is archived.

    Args:
        tally: the tally of known events; each new event is added before it is yielded.

    Raises:
        EventsLost: the log has lost a yielded event, and the gap is recorded. Follow again with a new tally.
        UnknownConversation: there is no such conversation, or it was deleted meanwhile.
    """
    if tally.last_event_id and await has_ended(client, conversation_id, tally, until=until):
        return
    tail = client.tail(conversation_id, after=tally.last_event_id, is_whole=is_whole, is_endless=True)
    async with contextlib.aclosing(end_tail(client, conversation_id, tally, tail, until=until)) as events:
        async for event in events:
            yield event


async def tail_until_settled(
    client: Followable, conversation_id: str, tail: AsyncGenerator[Event, None], *, known: Sequence[Event], after: int
) -> AsyncGenerator[Event, None]:
    """Yield the events of an endless tail that starts after an event, until the conversation has settled.

    Args:
        known: the events up to `after`.
    """
    tally = Tally.of(known)
    if after and tally.last_event_id == after and await has_ended(client, conversation_id, tally):
        await tail.aclose()
        return
    async with contextlib.aclosing(end_tail(client, conversation_id, tally, tail)) as events:
        async for event in events:
            yield event


async def end_tail(
    client: Followable,
    conversation_id: str,
    tally: Tally,
    tail: AsyncGenerator[Event, None],
    *,
    until: Until = Until.SETTLED,
) -> AsyncGenerator[Event, None]:
    """Yield the events of an endless tail until the conversation's end; each is added to the tally first."""
    async with contextlib.aclosing(tail) as events:
        async for event in events:
            tally.add(event)
            yield event
            if await has_ended(client, conversation_id, tally, until=until):
                return


async def has_ended(client: Followable, conversation_id: str, tally: Tally, *, until: Until = Until.SETTLED) -> bool:
    """Return whether the conversation has ended, and its log contains no event after those that were read.

    A log that leaves the store meanwhile counts as ended.
    """
    if not until.is_met(tally.status):
        return False
    try:
        return tally.last_event_id >= await client.last_id(conversation_id)
    except UnknownConversation:
        return True
